"""The interface of a source of point clouds; shared checks and reading through the row cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsepipe.data.files import log_once, scan_files
from sparsepipe.data.listing import Listing
from sparsepipe.data.mesh_rows import FRAME_NUMBERS, QUANTA
from sparsepipe.data.points import (
    FloatArray,
    Frames,
    HeldArray,
    IntArray,
    MappedArray,
    PointSet,
    Split,
)
from sparsepipe.data.row_cache import DONE, RowCache, RowReader
from sparsepipe.data.shape_files import SHAPE_SUFFIXES
from sparsepipe.errors import REMEDY, DataError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores

_LOG = logging.getLogger(__name__)

_NAMED_FILES = 10
_FOLDERS = ("*/*", "*/train/*", "train/*/*")
"""Where shapes lie that ``ClassFolder`` reads."""
_MOST_SEEN = 10_000
LOCK_WAIT_S = 7_200.0


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of the cache in which a source keeps prepared data; see ``ShapeDataModule``.

    Attributes:
        directory: directory of all caches; it can be deleted, since caches are built again.
        points: points sampled from each mesh.
        seed: seed of the sampling.

    Raises:
        ConfigError: a number is too small; the message names its configuration key.
    """

    directory: Path
    points: Count = 16_384
    seed: Seed = 0
    strict: bool = False
    workers: CountFrom0 = 0
    lock_wait_s: float = LOCK_WAIT_S


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
    """The error for a root with another layout; names its content and the fitting data group."""
    found = sorted(entry.name + "/" * entry.is_dir() for entry in root.iterdir())
    listing = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return DataError(
        f"data.root={root} should hold {expected}, but holds {listing or 'nothing'}",
        remedy=_hint(root, expected),
    )


def _hint(root: Path, expected: str) -> str:
    """A remedy for a root with another layout."""
    fitting = _fitting_group(root)
    if fitting:
        return f"use data={fitting}, which reads this layout"
    for inner in sorted(path for path in root.iterdir() if path.is_dir()):
        if fitting := _fitting_group(inner):
            return f"set data.root={inner} (with data={fitting})"
    return f"set data.root to the directory that holds {expected}"


def _fitting_group(root: Path) -> str | None:
    """The data group whose layout a directory seems to have."""
    if (root / "train.npz").is_file() or (root / "test.npz").is_file():
        return "modelnet40_points"
    if any(root.glob("modelnet*_shape_names.txt")):
        return "modelnet40_normal_resampled"
    classes = {path.parent.parent.name for path in root.glob("*/train/*.off")}
    if classes:
        return "modelnet10" if len(classes) <= 10 else "modelnet40"
    in_folders = (path for layout in _FOLDERS for path in root.glob(layout))
    if any(path.suffix.lower() in SHAPE_SUFFIXES for path in islice(in_folders, _MOST_SEEN)):
        return "folder"
    return None


def open_rows(listing: Listing, reader: RowReader, cache: CacheSettings) -> RowCache:
    """The cache of a listing's rows, after building missing ones.

    Raises:
        DataError: see ``RowCache.build``; or files are corrupt and ``cache.strict`` is set.
    """
    files = scan_files(listing.root, listing.names, cache_directory=cache.directory)
    rows = RowCache(files, reader, cache_directory=cache.directory)
    built = rows.build(workers=cache.workers or usable_cores(), lock_wait_s=cache.lock_wait_s)
    faults = rows.corrupt()
    if faults:
        where = rows.directory / "corrupt.json"
        be = "is" if len(faults) == 1 else "are"
        summary = f"{len(faults)} of {len(files)} {listing.split} files {be} corrupt"
        shown, remedies = _explain(faults)
        if cache.strict:
            raise DataError(
                f"{summary}:\n{shown}",
                remedy=f"{remedies}; or set data.strict=false to leave them out; all are listed in "
                f"{where}",
            )
        if built:
            text = "%s and left out (listed in %s):\n%s" + REMEDY + "%s"
            _LOG.warning(text, summary, where, shown, remedies)
        else:
            log_once(f"{summary} and left out, as before (listed in {where})")
    return rows


def _explain(faults: Mapping[str, str]) -> tuple[str, str]:
    """The first faults, a line each, and their remedies, each once."""
    some = [faults[name].partition(REMEDY) for name in sorted(faults)[:_NAMED_FILES]]
    lines = [f"  {fault}" for fault, *_ in some]
    if len(faults) > _NAMED_FILES:
        lines.append(f"  and {len(faults) - _NAMED_FILES} more")
    remedies = dict.fromkeys(remedy or "replace these files" for *_, remedy in some)
    return "\n".join(lines), "; ".join(remedies)


def open_points(listing: Listing, reader: RowReader, cache: CacheSettings) -> PointSet:
    """The clouds of a listing whose rows are quantised points.

    Raises:
        DataError: see ``open_rows``; or no usable shape remains (in training, of any class).
    """
    rows = open_rows(listing, reader, cache)
    rows_S = np.flatnonzero(rows.state_S() == DONE)
    labels_S = listing.labels_S[rows_S]
    _check_usable(listing, labels_S, rows)
    return quantised_points(
        rows.rows,
        rows.meta_SK()[rows_S],
        rows_S=rows_S,
        labels_S=labels_S,
        names=tuple(Path(listing.names[row]).stem for row in rows_S),
        classes=listing.classes,
        files=tuple(str(listing.root / listing.names[row]) for row in rows_S),
    )


def quantised_points(
    points: MappedArray | HeldArray, meta_SK: FloatArray, **of_shapes: Any
) -> PointSet:
    """Clouds that :func:`sparsepipe.data.mesh_rows.quantise` has made, with their frames.

    Args:
        points: rows [R, P, 3].
        meta_SK: the frame of each shape, and perhaps how many points its file has.
        of_shapes: the other attributes of :class:`PointSet`.
    """
    frame_S10, counts_SK = np.split(meta_SK, [FRAME_NUMBERS], axis=1)
    low_S3, high_S3 = frame_S10[:, 0:3], frame_S10[:, 3:6]
    return PointSet(
        points=points,
        offset_S3=low_S3,
        step_S3=((high_S3 - low_S3) / np.float32(QUANTA)).astype(np.float32),
        frames=Frames(low_S3, high_S3, frame_S10[:, 6:9], frame_S10[:, 9]),
        counts_S=counts_SK[:, 0].astype(np.int64) if counts_SK.size else None,
        **of_shapes,
    )


def _check_usable(listing: Listing, labels_S: IntArray, rows: RowCache) -> None:
    """Require a usable shape of every class for training, and any usable shape for a test."""
    if not len(labels_S):
        raise DataError(
            f"no usable {listing.split} shape under {listing.root}: all {len(listing.names)} "
            "files are corrupt",
            remedy="replace the files; their faults are listed in "
            f"{rows.directory / 'corrupt.json'}",
        )
    counts_K = np.bincount(labels_S[labels_S >= 0], minlength=len(listing.classes))
    empty: Sequence[str] = [listing.classes[label] for label in np.flatnonzero(counts_K == 0)]
    if empty and listing.split == "train":
        raise DataError(
            f"no usable training shape of class {', '.join(empty)} under {listing.root}: all "
            "its files are corrupt",
            remedy=f"replace the files listed in {rows.directory / 'corrupt.json'}, or remove "
            "the class's folder",
        )
