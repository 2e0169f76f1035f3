"""Point clouds in two npz files, ``train.npz`` and ``test.npz``.

Each has ``points`` [S, P, 3] (floats or integers), ``labels`` [S], ``classes`` (their names) and
optionally ``names`` [S], ``scale``, a factor of ``points``, and ``offset`` [3] or [S, 3], which is
added to the product in double precision, as in LAS files.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.cache import CacheSettings, build_once
from sparsepipe.data.files import check_regular, digest_values, require_root, scan_files
from sparsepipe.data.points import SPLITS, Frames, MappedArray, PointSet, Split, measure_frames
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing

_VERSION = 2
"""Increased with any change to the content of the cache."""
_LISTS = ("labels", "classes", "names")
_WHERE_FROM = (
    "the bundle holds train.npz and test.npz with the arrays points, labels, classes, names, scale "
    "and offset; its shapes come from ModelNet, https://modelnet.cs.princeton.edu"
)


class NpzBundle:
    """Source: ``root/train.npz`` and ``root/test.npz``.

    The points are unpacked once into a memory-mapped ``.npy`` in the cache.

    Args:
        root: directory with the two files.
        needs_labels: whether files without ``labels`` and ``classes`` raise a DataError; if not,
            the shapes in such files have no labels.
    """

    def __init__(self, root: Path | str | None, *, needs_labels: bool = True) -> None:
        self._needs_labels = needs_labels
        self.root = require_root(root, what="an npz bundle of point clouds", where_from=_WHERE_FROM)
        for split in SPLITS:
            with _explained(path := self.root / f"{split}.npz"), zipfile.ZipFile(path):
                pass  # a broken archive fails here, before all of it is read for its fingerprint

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """Returns the clouds of a split; see ``PointSource.load``."""
        path = self.root / f"{split}.npz"
        (file,) = scan_files(self.root, [path.name], cache_directory=cache.directory)
        directory = cache.directory / "npz" / f"v{_VERSION}_{file.digest}"
        points, frames_path = MappedArray(directory / "points.npy"), directory / "frames.npz"

        def build() -> None:
            with (
                _explained(path),
                zipfile.ZipFile(path) as archive,
                archive.open("points.npy") as member,
                replacing(points.path) as temporary,
            ):
                with temporary.open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)
                points_SP3 = np.load(temporary, mmap_mode="r", allow_pickle=False)
                is_numbers = points_SP3.dtype.kind in "iuf" and points_SP3.size
                if points_SP3.ndim != 3 or points_SP3.shape[2] != 3 or not is_numbers:
                    shape, dtype = points_SP3.shape, points_SP3.dtype
                    raise ValueError(
                        f"points {shape} of {dtype} are not numbers [shapes, points, 3]"
                    )
            arrays = self._arrays(path, len(points.array))
            offset_S3 = np.broadcast_to(arrays["offset"], (len(points.array), 3))
            with _explained(path), np.errstate(invalid="ignore"):
                scale = float(arrays["scale"])
                frames = measure_frames(points.array, scale, offset_S3=offset_S3.astype(np.float64))
                if not np.isfinite(frames.radius_S).all():
                    first = int(np.flatnonzero(~np.isfinite(frames.radius_S))[0])
                    raise ValueError(f"points of shape {first} (counted from 0) are not finite")
            origin_S3 = np.empty((0, 3)) if frames.origin_S3 is None else frames.origin_S3
            stored = (frames.low_S3, frames.high_S3, frames.center_S3, frames.radius_S, origin_S3)
            with replacing(frames_path) as temporary, temporary.open("wb") as stream:
                np.savez(stream, *stored)

        build_once(frames_path, build, wait_s=cache.lock_wait_s)
        with np.load(frames_path) as saved:
            low, high, center, radius, origin_S3 = (saved[f"arr_{number}"] for number in range(5))
        num_shapes = len(points.array)
        arrays = self._arrays(path, num_shapes)
        names = arrays.get("names", np.char.add(f"{split}_", np.arange(num_shapes).astype(str)))
        return PointSet(
            points=points,
            rows_S=np.arange(num_shapes),
            offset_S3=np.broadcast_to(arrays["offset"], (num_shapes, 3)).astype(np.float64),
            step_S3=np.full((num_shapes, 3), float(arrays["scale"])),
            frames=Frames(low, high, center, radius, origin_S3 if origin_S3.size else None),
            labels_S=arrays["labels"].astype(np.int64),
            names=tuple(str(name) for name in names),
            classes=tuple(str(name) for name in arrays["classes"]),
        )

    def fingerprint(self, cache: CacheSettings) -> str:
        """Returns a hex digest of the two files' contents."""
        names = [f"{split}.npz" for split in SPLITS]
        files = scan_files(self.root, names, cache_directory=cache.directory)
        return digest_values([file.digest for file in files])

    def _arrays(self, path: Path, num_shapes: int) -> dict[str, NDArray[Any]]:
        """Returns a bundle's checked arrays except ``points``; only ``names`` may be missing."""
        with _explained(path), np.load(path, allow_pickle=False) as bundle:
            wanted = {*bundle.files} & {*_LISTS, "scale", "offset"}
            arrays = {"scale": np.ones(()), "offset": np.zeros(3)}
            arrays |= {name: bundle[name] for name in wanted}
            missing = sorted({"labels", "classes"} - arrays.keys())
            if len(missing) == 2 and not self._needs_labels:
                arrays |= {"labels": np.full(num_shapes, -1), "classes": np.empty(0, np.str_)}
            elif missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            for name in {*_LISTS} & arrays.keys():
                if arrays[name].ndim == 2 and arrays[name].shape[1] == 1:
                    arrays[name] = arrays[name][:, 0]
            labels_S, classes = arrays["labels"], arrays["classes"]
            if labels_S.shape != (num_shapes,) or labels_S.dtype.kind not in "iu":
                raise ValueError(f"labels are not {num_shapes} whole numbers, one for each shape")
            if labels_S.min() < (0 if len(classes) else -1) or labels_S.max() >= len(classes):
                known = f"from 0 to {len(classes) - 1}" if len(classes) else "-1: no classes"
                raise ValueError(
                    f"labels go from {labels_S.min()} to {labels_S.max()}, not {known}"
                )
            scale, offset = arrays["scale"], arrays["offset"]
            if scale.shape != () or not 0 < scale < np.inf:
                raise ValueError(f"scale is {scale}, not a positive number")
            if offset.shape not in ((3,), (num_shapes, 3)) or not np.isfinite(offset).all():
                raise ValueError(f"offset is not finite, or not of shape [3] or [{num_shapes}, 3]")
            if "names" in arrays and arrays["names"].shape != labels_S.shape:
                raise ValueError(f"names have shape {arrays['names'].shape}, not ({num_shapes},)")
        return arrays


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors of reading the archive in the block, except OSErrors, into a DataError."""
    check_regular(path)
    try:
        yield
    except (DataError, MemoryError, OSError):
        raise
    except Exception as error:  # zipfile, decompressors and numpy raise many types
        raise DataError(
            f"{path} is not an npz bundle of point clouds: {error}",
            remedy=f"copy the file again or set data.root to another bundle; {_WHERE_FROM}",
        ) from error
