"""From a list of shape files to a point set, by way of the row cache.

Shapes: S files of a split.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsepipe.data.manifest import scan_files
from sparsepipe.data.mesh_rows import QUANTA
from sparsepipe.data.points import Frames, IntArray, PointSet
from sparsepipe.data.rows import DONE, RowCache, RowReader
from sparsepipe.data.sources.base import CacheSettings, Split
from sparsepipe.errors import DataError
from sparsepipe.utils.host import usable_cores

_LOG = logging.getLogger(__name__)
_NAMED_FILES = 10


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one split.

    Attributes:
        root: the directory that ``names`` are relative to.
        split: which split it is, for messages.
        names: files, with forward slashes.
        labels_S: class number of each file.
        classes: class names.
    """

    root: Path
    split: Split
    names: tuple[str, ...]
    labels_S: IntArray
    classes: tuple[str, ...]


def open_rows(listing: Listing, reader: RowReader, cache: CacheSettings) -> RowCache:
    """The cache of a listing's rows, built as far as it was not.

    Raises:
        DataError: see ``RowCache.build``; or files are corrupt and ``cache.strict``.
    """
    files = scan_files(listing.root, listing.names, cache_directory=cache.directory)
    rows = RowCache(files, reader, cache_directory=cache.directory)
    built = rows.build(workers=cache.workers or usable_cores(), lock_wait_s=cache.lock_wait_s)
    faults = rows.corrupt()
    if faults:
        lines = [f"  {name}: {fault}" for name, fault in sorted(faults.items())]
        shown = "\n".join(lines[:_NAMED_FILES])
        if len(lines) > _NAMED_FILES:
            shown += f"\n  and {len(lines) - _NAMED_FILES} more"
        where = rows.directory / "corrupt.json"
        summary = f"{len(faults)} of {len(files)} {listing.split} files are corrupt"
        if cache.strict:
            raise DataError(
                f"{summary}:\n{shown}",
                remedy="replace these files, or set data.strict=false to leave them out; "
                f"all are listed in {where}",
            )
        if built:
            _LOG.warning("%s and left out (listed in %s):\n%s", summary, where, shown)
        else:  # every rank comes here, those beyond the first with a higher level
            _LOG.info("%s and left out, as before (listed in %s)", summary, where)
    return rows


def open_points(listing: Listing, reader: RowReader, cache: CacheSettings) -> PointSet:
    """The clouds of a listing whose rows are quantised points.

    Raises:
        DataError: see ``open_rows``; or no usable shape remains, in training of any class.
    """
    rows = open_rows(listing, reader, cache)
    rows_S = np.flatnonzero(rows.state_S() == DONE)
    labels_S = listing.labels_S[rows_S]
    _check_usable(listing, labels_S, rows)
    frame_S10 = rows.meta_SK()[rows_S]
    low_S3, high_S3 = frame_S10[:, 0:3], frame_S10[:, 3:6]
    return PointSet(
        points=rows.rows,
        rows_S=rows_S,
        offset_S3=low_S3,
        step_S3=((high_S3 - low_S3) / np.float32(QUANTA)).astype(np.float32),
        frames=Frames(low_S3, high_S3, frame_S10[:, 6:9], frame_S10[:, 9]),
        labels_S=labels_S,
        names=tuple(Path(listing.names[row]).stem for row in rows_S),
        classes=listing.classes,
    )


def _check_usable(listing: Listing, labels_S: IntArray, rows: RowCache) -> None:
    """Training needs a usable shape of every class, a test one at all."""
    counts_K = np.bincount(labels_S, minlength=len(listing.classes))
    empty: Sequence[str] = [listing.classes[label] for label in np.flatnonzero(counts_K == 0)]
    if len(empty) == len(listing.classes):
        raise DataError(
            f"no usable {listing.split} shape under {listing.root}: all {len(listing.names)} "
            "files are corrupt",
            remedy=f"replace the files; what is wrong with each is listed in "
            f"{rows.directory / 'corrupt.json'}",
        )
    if empty and listing.split == "train":
        raise DataError(
            f"no usable training shape of class {', '.join(empty)} under {listing.root}: all "
            "its files are corrupt",
            remedy=f"replace the files listed in {rows.directory / 'corrupt.json'}, or remove "
            "the class's folder",
        )
