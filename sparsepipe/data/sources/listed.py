"""The interface of a source of point clouds, and sources with a file for each shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from sparsepipe.data.cache import CachedRows, CacheSettings, RowReader, cached_rows
from sparsepipe.data.files import (
    digest_listing,
    digest_values,
    log_once,
    require_root,
    scan_files,
)
from sparsepipe.data.formats import SHAPE_SUFFIXES
from sparsepipe.data.listing import Listing, list_folder, named
from sparsepipe.data.points import SPLITS, PointSet, Split
from sparsepipe.data.shape_rows import ShapeSampler, quantised_points
from sparsepipe.data.sources.npz import NpzBundle
from sparsepipe.errors import REMEDY, DataError

_LOG = logging.getLogger(__name__)

_NAMED_FILES = 10
_DOMAIN_SUFFIXES = (".npy", ".xyz", ".glb", ".obj", ".off", ".stl", ".ply")
"""Suffixes of shapes in folders of domains, where .csv, .npz and .txt files are other data."""


class PointSource(Protocol):
    """Source of the point clouds of both splits.

    A source may also have ``takes_cached_points = True`` if it stores ``CacheSettings.points``
    points of every shape, so that ``num_points`` is checked before a cache is built,
    ``takes_first_points = True`` if these are the first points of a file instead of drawn ones, and
    ``load_surface`` (see ``OffTree``) if the source has meshes.
    """

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """Returns the point clouds of a split, after building the cache if necessary.

        Raises:
            DataError: the root has another layout, or no usable shape (train: of some class).
        """
        ...

    def fingerprint(self, cache: CacheSettings) -> str:
        """Returns a hex digest of the data, which does not depend on their location on disk."""
        ...


class ListedShapes:
    """Base of sources with a file for each shape, of any format in ``sparsepipe.data.formats``.

    Attributes:
        root: the folder of the files.
        listings: the files of both splits.
    """

    takes_cached_points = True
    takes_first_points = False
    root: Path
    listings: Mapping[Split, Listing]

    def listing(self, split: Split) -> Listing:
        """Returns the files of a split; raises a DataError if the folder has another layout."""
        return self.listings[split]

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """Returns the clouds of a split; see ``PointSource.load``."""
        listing = self.listing(split)
        sampler = ShapeSampler(cache.points, cache.seed, first=self.takes_first_points)
        cached = open_rows(listing, sampler, cache)
        rows_S, where = cached.usable_S, cached.directory / "corrupt.json"
        labels_S = listing.labels_S[rows_S]
        empty = [name for label, name in enumerate(listing.classes) if label not in labels_S]
        if not len(labels_S) or (empty and split == "train"):
            of_class = f" of these classes: {named(empty)}" if len(labels_S) else ""
            raise DataError(
                f"{self.root} has only corrupt {split} files{of_class}",
                remedy=f"replace them, or remove their class folders; {where} lists the faults",
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
        """Returns a hex digest of the files' names, sizes and contents."""
        return digest_values(self._digests(cache))

    def _digests(self, cache: CacheSettings) -> list[str]:
        listings = [self.listing(split) for split in SPLITS]
        scanned = [
            scan_files(self.root, x.names, cache_directory=cache.directory) for x in listings
        ]
        return list(map(digest_listing, scanned))


def open_rows(listing: Listing, reader: RowReader, cache: CacheSettings) -> CachedRows:
    """Returns what ``reader`` made of a listing's files, after building the cache if necessary.

    The call that builds the cache warns of corrupt files by name; later calls only log their
    number. With ``cache.strict``, corrupt files raise a DataError.
    """
    files = scan_files(listing.root, listing.names, cache_directory=cache.directory)
    cached = cached_rows(files, reader, cache)
    if not cached.faults:
        return cached
    where = cached.directory / "corrupt.json"
    are = "is" if len(cached.faults) == 1 else "are"
    summary = f"{len(cached.faults)} of {len(files)} {listing.split} files {are} corrupt"
    some = [cached.faults[name].partition(REMEDY) for name in sorted(cached.faults)[:_NAMED_FILES]]
    shown = "\n".join(f"  {fault}" for fault, *_ in some)
    remedies = "; ".join(dict.fromkeys(remedy for *_, remedy in some))
    if cache.strict:
        raise DataError(
            f"{summary} (listed in {where}):\n{shown}",
            remedy=f"{remedies}; for shapes, data.strict=false leaves out corrupt files",
        )
    if cached.is_new:
        text = "%s and left out (listed in %s):\n%s" + REMEDY + "%s"
        _LOG.warning(text, summary, where, shown, remedies)
    else:
        log_once(f"{summary} and left out, as before (listed in {where})")
    return cached


class ClassFolder(ListedShapes):
    """Source: meshes and clouds of any format, in a folder for each class.

    Args:
        root: the folder.
        split: how shapes are divided for training and testing. A number is the share of each
            class's files for testing, drawn at random but always the same for a seed. A path is
            that of a csv file with the columns ``file``, relative to ``root``, and ``split``,
            ``train`` or ``test``; files that it does not list are left out. None: the folders
            ``train`` and ``test``, or the share 0.2 without such folders.
        seed: seed of that draw, apart from the run's seed: all runs have the same test shapes.
    """

    def __init__(
        self, root: Path | str | None, *, split: float | str | None = None, seed: int = 0
    ) -> None:
        self.root = require_root(
            root,
            what="a folder with a folder for each class",
            where_from=f"the files have the suffixes {', '.join(SHAPE_SUFFIXES)}",
        )
        self.listings = list_folder(
            self.root, suffixes=SHAPE_SUFFIXES, split=split, seed=seed, needs_classes=True
        )


def shape_folder(root: Path | str | None, *, test_share: float = 0.2) -> PointSource:
    """Returns the source of a folder: an ``NpzBundle`` if it has ``train.npz``, else its files.

    Args:
        root: the folder, with or without class folders.
        test_share: share of each class for testing, unless files or folders divide the shapes.
    """
    suffixes = ", ".join(_DOMAIN_SUFFIXES)
    path = require_root(root, what="a folder of meshes or clouds", where_from=f"files: {suffixes}")
    if (path / "train.npz").is_file():
        return NpzBundle(root, needs_labels=False)
    source = ListedShapes()
    source.root = path
    source.listings = list_folder(path, suffixes=_DOMAIN_SUFFIXES, share=test_share)
    return source
