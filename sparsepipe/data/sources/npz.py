"""Point clouds in two npz files, ``train.npz`` and ``test.npz``.

Each has ``points`` [S, P, 3] (floats, or integers with a factor ``scale`` to coordinates),
``labels`` [S], ``classes`` (names) and optionally ``names`` [S] and ``offset`` [3] or [S, 3], which
is added to coordinates in double precision, as in LAS files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_class_names, digest_values, explaining_storage, scan_files
from sparsepipe.data.npz_files import open_npz
from sparsepipe.data.points import (
    SPLITS,
    ExactArray,
    Frames,
    MappedArray,
    PointSet,
    Split,
    measure_frames,
)
from sparsepipe.data.sources.base import CacheSettings, require_root, wrong_layout
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing

_LOG = logging.getLogger(__name__)

_VERSION = 1
"""Increased with any change to the content of the cache."""

_LISTS = ("labels", "classes", "names")
_SMALL = (*_LISTS, "scale", "offset")
"""Arrays that are read into memory; a bundle may have others, which are not read."""

WHERE_FROM = (
    "the bundle holds train.npz and test.npz with the arrays points, labels, classes, "
    "names, scale and offset; its shapes come from ModelNet, https://modelnet.cs.princeton.edu"
)


class NpzBundle:
    """Source: ``root/train.npz`` and ``root/test.npz``.

    The points are unpacked once into a memory-mapped ``.npy`` in the cache.

    Args:
        root: directory with the two files.
        needs_labels: files without ``labels`` and ``classes`` are refused; else their shapes have
            no labels.
    """

    def __init__(self, root: Path | str | None, *, needs_labels: bool = True) -> None:
        self._needs_labels = needs_labels
        self.root = require_root(root, what="an npz bundle of point clouds", where_from=WHERE_FROM)
        for split in SPLITS:
            path = self.root / f"{split}.npz"
            if not path.exists():
                raise wrong_layout(self.root, expected="train.npz and test.npz")
            with _explained(path), open_npz(path):
                pass  # what is no archive is refused before all of it is read for its fingerprint

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        path = self.root / f"{split}.npz"
        (file,) = scan_files(self.root, [path.name], cache_directory=cache.directory)
        directory = cache.directory / "npz" / f"v{_VERSION}_{file.digest}"
        small = _read_small(path, needs_labels=self._needs_labels)
        points_path = directory / "points.npy"
        if not points_path.is_file():
            _LOG.info("unpacking %s into %s", path, directory)
            with explaining_storage(cache.directory, setting="data.cache_dir"):
                _unpack_points(path, points_path)
        points = MappedArray(points_path)
        if "labels" not in small:
            unknown_S = np.full(len(points.array), -1)
            small |= {"labels": unknown_S, "classes": np.empty(0, np.str_)}
        _check_arrays(path, points.array, small)
        scale = float(small.get("scale", 1.0))
        num_shapes = len(points.array)
        offset_S3 = np.broadcast_to(small.get("offset", np.zeros(3)), (num_shapes, 3))
        offset_S3 = offset_S3.astype(np.float64)
        name = "frames_3.npz" if "offset" in small else "frames_2.npz"
        frames = _frames(path, directory / name, points.array, scale, cache, offset_S3=offset_S3)
        names = small.get("names", np.char.add(f"{split}_", np.arange(num_shapes).astype(str)))
        return PointSet(
            points=points,
            rows_S=np.arange(num_shapes),
            offset_S3=offset_S3,
            step_S3=np.full((num_shapes, 3), scale),
            frames=frames,
            labels_S=small["labels"].astype(np.int64),
            names=tuple(str(name) for name in names),
            classes=tuple(str(name) for name in small["classes"]),
        )

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of the two files; see ``Source.fingerprint``."""
        names = [f"{split}.npz" for split in SPLITS]
        files = scan_files(self.root, names, cache_directory=cache.directory)
        return digest_values([file.digest for file in files])


def _unreadable(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} is not an npz bundle of point clouds: {reason}",
        remedy=f"copy the file again or set data.root to another bundle; {WHERE_FROM}",
    )


def _read_small(path: Path, *, needs_labels: bool) -> dict[str, NDArray[Any]]:
    """The arrays of a bundle beside the points; those with a single column as lists."""
    with _explained(path), open_npz(path) as bundle:
        labels = {"labels", "classes"}
        if not needs_labels and not labels & bundle.names:
            labels = set()
        if missing := ({"points"} | labels) - bundle.names:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        small = {name: bundle.read(name) for name in _SMALL if name in bundle.names}
        for name, values in small.items():
            if name in _LISTS and values.ndim == 2 and values.shape[1] == 1:
                small[name] = values[:, 0]
        return small


def _unpack_points(path: Path, target: Path) -> None:
    """Write the points as ``.npy`` file in chunks."""
    with replacing(target) as temporary, _explained(path), open_npz(path) as bundle:
        bundle.unpack("points", temporary)
        points_SP3 = np.load(temporary, mmap_mode="r")
        if points_SP3.dtype.kind not in "iuf":
            raise ValueError(f"points are of type {points_SP3.dtype}, not numbers")
        if points_SP3.ndim != 3 or points_SP3.shape[2] != 3 or not points_SP3.size:
            raise ValueError(f"points has shape {points_SP3.shape}, not [shapes, points, 3]")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what is wrong with an archive into an error with a remedy."""
    try:
        yield
    except ValueError as error:
        raise _unreadable(path, error) from error


def _check_arrays(path: Path, points_SP3: NDArray[Any], small: dict[str, NDArray[Any]]) -> None:
    """Raise ``DataError`` for arrays that do not fit together."""
    labels_S, classes = small["labels"], small["classes"]
    check_class_names([str(name) for name in classes.ravel()], path)
    if labels_S.shape != points_SP3.shape[:1]:
        raise _unreadable(path, f"{len(points_SP3)} shapes, but labels of shape {labels_S.shape}")
    if labels_S.dtype.kind not in "iu" or classes.ndim != 1:
        raise _unreadable(path, "labels are not integers, or classes is not a list of names")
    least = 0 if len(classes) else -1
    if labels_S.min() < least or labels_S.max() >= len(classes):
        raise _unreadable(path, f"labels up to {labels_S.max()} for {len(classes)} classes")
    scale = small.get("scale", np.ones(()))
    if scale.shape != () or scale.dtype.kind not in "iuf" or not 0 < scale < np.inf:
        raise _unreadable(path, f"scale is {scale}, not a positive number")
    _check_offset(path, small.get("offset", np.zeros(3)), shapes=len(labels_S))
    names = small.get("names")
    if names is not None and names.shape != labels_S.shape:
        raise _unreadable(path, f"{len(labels_S)} shapes, but names of shape {names.shape}")


def _check_offset(path: Path, offset: NDArray[Any], *, shapes: int) -> None:
    if offset.shape not in ((3,), (shapes, 3)):
        raise _unreadable(path, f"offset is of shape {offset.shape}, not [3] or [{shapes}, 3]")
    if offset.dtype.kind not in "iuf":
        raise _unreadable(path, "offset is not of numbers")
    if not np.isfinite(offset).all():
        raise _unreadable(path, "offset is not finite")


def _frames(
    bundle: Path,
    path: Path,
    points_SP3: NDArray[Any],
    scale: float,
    cache: CacheSettings,
    *,
    offset_S3: ExactArray,
) -> Frames:
    """Frames of all clouds of a bundle, computed once and saved next to the points."""
    if not path.is_file():
        frames = measure_frames(points_SP3, scale, offset_S3=offset_S3)
        bad_S = ~np.isfinite(frames.radius_S)
        if bad_S.any():
            raise DataError(
                f"{int(bad_S.sum())} shapes of {bundle} have points that are not finite, "
                f"the first in row {int(np.flatnonzero(bad_S)[0])}",
                remedy="remove these rows from the bundle",
            )
        with (
            explaining_storage(cache.directory, setting="data.cache_dir"),
            replacing(path) as temporary,
            temporary.open("wb") as file,
        ):
            np.savez(
                file,
                low=frames.low_S3,
                high=frames.high_S3,
                center=frames.center_S3,
                radius=frames.radius_S,
                origin=np.empty((0, 3)) if frames.origin_S3 is None else frames.origin_S3,
            )
    with np.load(path) as saved:
        origin_S3 = saved["origin"] if saved["origin"].size else None
        return Frames(saved["low"], saved["high"], saved["center"], saved["radius"], origin_S3)
