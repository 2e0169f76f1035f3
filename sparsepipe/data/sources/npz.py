"""Point clouds in two npz files, ``train.npz`` and ``test.npz``.

Each has ``points`` [S, P, 3] (floats, or integers with a factor ``scale`` to coordinates),
``labels`` [S], ``classes`` (names) and optionally ``names`` [S] and ``offset`` [3] or [S, 3], which
is added to coordinates in double precision, as in LAS files.
"""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.files import (
    check_class_names,
    check_regular,
    digest_values,
    explaining_storage,
    scan_files,
)
from sparsepipe.data.points import (
    SPLITS,
    ExactArray,
    Frames,
    MappedArray,
    PointSet,
    Split,
    measure_frames,
)
from sparsepipe.data.sources.base import require_root, wrong_layout
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
            with _explained(path), zipfile.ZipFile(path):
                pass  # before all of it is read for its fingerprint

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        path = self.root / f"{split}.npz"
        (file,) = scan_files(self.root, [path.name], cache_directory=cache.directory)
        directory = cache.directory / "npz" / f"v{_VERSION}_{file.digest}"
        points = MappedArray(directory / "points.npy")
        if not points.path.is_file():
            _LOG.info("unpacking %s into %s", path, directory)
            with (
                explaining_storage(cache.directory, setting="data.cache_dir"),
                replacing(points.path) as temporary,
                _explained(path),
            ):
                _unpack_points(path, temporary)
        num_shapes = len(points.array)
        small = _read_small(path, num_shapes, needs_labels=self._needs_labels)
        scale = float(small.get("scale", 1.0))
        offset_S3 = np.broadcast_to(small.get("offset", np.zeros(3)), (num_shapes, 3))
        offset_S3 = offset_S3.astype(np.float64)
        frames_path = directory / ("frames_3.npz" if "offset" in small else "frames_2.npz")
        if not frames_path.is_file():
            frames = _measured_frames(path, points.array, scale, offset_S3)
            with (
                explaining_storage(cache.directory, setting="data.cache_dir"),
                replacing(frames_path) as temporary,
                temporary.open("wb") as stream,
            ):
                np.savez(
                    stream,
                    low=frames.low_S3,
                    high=frames.high_S3,
                    center=frames.center_S3,
                    radius=frames.radius_S,
                    origin=np.empty((0, 3)) if frames.origin_S3 is None else frames.origin_S3,
                )
        with np.load(frames_path) as saved:
            origin_S3 = saved["origin"] if saved["origin"].size else None
            frames = Frames(
                saved["low"], saved["high"], saved["center"], saved["radius"], origin_S3
            )
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


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an archive's fault into an error with a remedy."""
    check_regular(path)
    try:
        yield
    except (DataError, MemoryError, OSError):
        raise
    except Exception as error:  # zipfile, the decompressors and numpy have many
        raise DataError(
            f"{path} is not an npz bundle of point clouds: {error}",
            remedy=f"copy the file again or set data.root to another bundle; {WHERE_FROM}",
        ) from error


def _unpack_points(path: Path, target: Path) -> None:
    """Writes the points as an ``.npy`` file, piece by piece."""
    with (
        zipfile.ZipFile(path) as archive,
        archive.open("points.npy") as member,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    points_SP3 = np.load(target, mmap_mode="r", allow_pickle=False)
    if points_SP3.ndim != 3 or points_SP3.shape[2] != 3 or not points_SP3.size:
        raise ValueError(f"points has shape {points_SP3.shape}, not [shapes, points, 3]")
    if points_SP3.dtype.kind not in "iuf":
        raise ValueError(f"points are of type {points_SP3.dtype}, not numbers")


def _read_small(path: Path, num_shapes: int, *, needs_labels: bool) -> dict[str, NDArray[Any]]:
    """The arrays of a bundle beside the points, of which ``labels`` and ``classes`` are there."""
    with _explained(path), np.load(path, allow_pickle=False) as bundle:
        small = {name: bundle[name] for name in _SMALL if name in bundle.files}
        missing = sorted({"labels", "classes"} - small.keys())
        if len(missing) == 2 and not needs_labels:
            small |= {"labels": np.full(num_shapes, -1), "classes": np.empty(0, np.str_)}
        elif missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name in _LISTS:
            if name in small and small[name].ndim == 2 and small[name].shape[1] == 1:
                small[name] = small[name][:, 0]
        labels_S, classes = small["labels"], small["classes"]
        if labels_S.shape != (num_shapes,) or labels_S.dtype.kind not in "iu":
            raise ValueError(f"labels are not {num_shapes} whole numbers, one for each shape")
        if classes.ndim != 1:
            raise ValueError("classes is not a list of names")
        if labels_S.min() < (0 if len(classes) else -1) or labels_S.max() >= len(classes):
            raise ValueError(f"labels up to {labels_S.max()} for {len(classes)} classes")
        scale, offset = small.get("scale", np.ones(())), small.get("offset", np.zeros(3))
        if scale.shape != () or scale.dtype.kind not in "iuf" or not 0 < scale < np.inf:
            raise ValueError(f"scale is {scale}, not a positive number")
        if offset.shape not in ((3,), (num_shapes, 3)) or offset.dtype.kind not in "iuf":
            raise ValueError(f"offset is not numbers of shape [3] or [{num_shapes}, 3]")
        if not np.isfinite(offset).all():
            raise ValueError("offset is not finite")
        if "names" in small and small["names"].shape != labels_S.shape:
            raise ValueError(f"{num_shapes} shapes, but names of shape {small['names'].shape}")
    check_class_names([str(name) for name in classes], path)
    return small


def _measured_frames(
    path: Path, points_SP3: NDArray[Any], scale: float, offset_S3: ExactArray
) -> Frames:
    frames = measure_frames(points_SP3, scale, offset_S3=offset_S3)
    bad_S = ~np.isfinite(frames.radius_S)
    if bad_S.any():
        raise DataError(
            f"{int(bad_S.sum())} shapes of {path} have points that are not finite, "
            f"the first in row {int(np.flatnonzero(bad_S)[0])}",
            remedy="remove these rows from the bundle",
        )
    return frames
