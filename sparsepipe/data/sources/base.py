"""The interface of a source of point clouds, and what sources of files have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsepipe.data.cache import CachedRows, CacheSettings, RowReader, cached_rows
from sparsepipe.data.files import digest_listing, digest_values, log_once, scan_files
from sparsepipe.data.listing import Listing
from sparsepipe.data.points import SPLITS, FloatArray, Frames, PointSet, Split, StoredArray
from sparsepipe.data.shape_rows import FRAME_NUMBERS, QUANTA, ShapeSampler
from sparsepipe.errors import REMEDY, DataError
from sparsepipe.utils.files import expanded

_LOG = logging.getLogger(__name__)

_NAMED_FILES = 10


class Source(Protocol):
    """A source of point clouds, for both splits.

    A source may also have ``takes_cached_points = True`` if every shape has
    ``CacheSettings.points`` points, so that ``num_points`` is checked before a cache is built,
    ``takes_first_points = True`` if these are the first ones of a file, not drawn from it, and
    ``load_surface`` if it has meshes, see ``OffTree``.
    """

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The point clouds of a split, after building the cache if necessary.

        Raises:
            DataError: the root is missing, has another layout or holds no usable shape.
        """
        ...

    def fingerprint(self, cache: CacheSettings) -> str:
        """Hex digest of the data in the root, independent of their location on the disk."""
        ...


class ListedShapes(ABC):
    """Base of sources with a file for each shape, of any format in ``sparsepipe.data.formats``.

    Attributes:
        root: the folder of the files.
    """

    takes_cached_points = True
    takes_first_points = False
    root: Path

    @abstractmethod
    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: the root has another layout.
        """

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        listing = self.listing(split)
        sampler = ShapeSampler(cache.points, cache.seed, first=self.takes_first_points)
        cached = open_rows(listing, sampler, cache)
        rows_S, where = cached.usable_S, cached.directory / "corrupt.json"
        labels_S = listing.labels_S[rows_S]
        if not len(labels_S):
            raise DataError(
                f"all {len(listing.names)} {split} files under {self.root} are corrupt",
                remedy=f"replace the files; their faults are listed in {where}",
            )
        empty = [name for label, name in enumerate(listing.classes) if label not in labels_S]
        if empty and split == "train":
            raise DataError(
                f"all training files of class {', '.join(empty)} under {self.root} are corrupt",
                remedy=f"replace the files listed in {where}, or remove the class's folder",
            )
        return quantised_points(
            cached.rows,
            cached.meta_SK[rows_S],
            rows_S=rows_S,
            labels_S=labels_S,
            names=tuple(Path(listing.names[row]).stem for row in rows_S),
            classes=listing.classes,
            files=tuple(str(self.root / listing.names[row]) for row in rows_S),
        )

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and contents; see ``Source.fingerprint``."""
        scanned = [
            scan_files(self.root, self.listing(split).names, cache_directory=cache.directory)
            for split in SPLITS
        ]
        return digest_values([digest_listing(files) for files in scanned])


def require_root(root: Path | str | None, *, what: str, where_from: str) -> Path:
    """The root as an absolute path.

    Args:
        root: the user's setting ``data.root``.
        what: description of the expected layout, for the message.
        where_from: where to get such data, for the remedy.

    Raises:
        DataError: no root is set, or it is not a directory.
    """
    if root is None or str(root) == "":
        raise DataError(
            f"data.root is not set; it should name {what}",
            remedy=f"set data.root=/path/to/it; {where_from}",
        )
    path = expanded(root).absolute()
    if not path.is_dir():
        raise DataError(
            f"data.root={root} is not a directory; it should be {what}",
            remedy=f"set data.root to an existing directory; {where_from}",
        )
    return path


def wrong_layout(root: Path, *, expected: str) -> DataError:
    """The error for a root with another layout, which names its content."""
    found = sorted(entry.name + "/" * entry.is_dir() for entry in root.iterdir())
    listing = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return DataError(
        f"data.root={root} should hold {expected}, but holds {listing or 'nothing'}",
        remedy=f"set data.root to the directory that holds {expected}; data=folder reads meshes "
        "and clouds of any format in folders of classes",
    )


def open_rows(listing: Listing, reader: RowReader, cache: CacheSettings) -> CachedRows:
    """The rows of a listing's files, after building the cache if necessary.

    Corrupt files are named in a warning by the call that builds the cache, and counted once by
    later ones.

    Raises:
        DataError: see ``cached_rows``; or files are corrupt and ``cache.strict`` is set.
    """
    files = scan_files(listing.root, listing.names, cache_directory=cache.directory)
    cached = cached_rows(files, reader, cache)
    if not cached.faults:
        return cached
    where = cached.directory / "corrupt.json"
    summary = f"{len(cached.faults)} of {len(files)} {listing.split} files are corrupt"
    some = [cached.faults[name].partition(REMEDY) for name in sorted(cached.faults)[:_NAMED_FILES]]
    shown = "\n".join(f"  {fault}" for fault, *_ in some)
    if len(cached.faults) > _NAMED_FILES:
        shown += f"\n  and {len(cached.faults) - _NAMED_FILES} more"
    remedies = "; ".join(dict.fromkeys(remedy or "replace these files" for *_, remedy in some))
    if cache.strict:
        raise DataError(
            f"{summary}:\n{shown}",
            remedy=f"{remedies}; or set data.strict=false to leave them out; all are listed in "
            f"{where}",
        )
    if cached.is_new:
        text = "%s and left out (listed in %s):\n%s" + REMEDY + "%s"
        _LOG.warning(text, summary, where, shown, remedies)
    else:
        log_once(f"{summary} and left out, as before (listed in {where})")
    return cached


def quantised_points(points: StoredArray, meta_SK: FloatArray, **of_shapes: Any) -> PointSet:
    """Clouds that :class:`sparsepipe.data.shape_rows.ShapeSampler` has quantised.

    Args:
        points: rows [R, P, 3].
        meta_SK: the frame of each shape, and how many points its file has.
        of_shapes: the other attributes of :class:`PointSet`.
    """
    low_S3, high_S3 = meta_SK[:, 0:3], meta_SK[:, 3:6]
    return PointSet(
        points=points,
        offset_S3=low_S3,
        step_S3=((high_S3 - low_S3) / np.float32(QUANTA)).astype(np.float32),
        frames=Frames(low_S3, high_S3, meta_SK[:, 6:9], meta_SK[:, 9]),
        counts_S=meta_SK[:, FRAME_NUMBERS].astype(np.int64),
        **of_shapes,
    )
