"""Point clouds of a split: stored points memory-mapped, bounding boxes and labels in memory.

Shapes: S shapes of a split, P points stored per shape, N points in use, 3 axes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.errors import DataError

_LOG = logging.getLogger(__name__)

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

FloatArray = NDArray[np.float32]
ExactArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_CHUNK_SHAPES = 256
"""Shapes in memory at once while frames are measured."""


@dataclass(slots=True, eq=False)
class MappedArray:
    """A ``.npy`` file that is memory-mapped on first use in each process.

    Only its path is pickled: a loader's worker maps the same pages instead of receiving a copy.
    """

    path: Path
    _array: NDArray[Any] | None = field(default=None, init=False, repr=False)

    @property
    def array(self) -> NDArray[Any]:
        """The mapped array, read-only."""
        if self._array is None:
            # A plain ndarray view: indexing np.memmap makes a memmap each time.
            self._array = np.asarray(np.load(self.path, mmap_mode="r"))
        return self._array

    def __reduce__(self) -> tuple[type[MappedArray], tuple[Path]]:
        return MappedArray, (self.path,)


@dataclass(frozen=True, slots=True)
class HeldArray:
    """An array in memory, with the interface of a :class:`MappedArray`."""

    array: NDArray[Any]


StoredArray = MappedArray | HeldArray


@dataclass(frozen=True, slots=True)
class Frames:
    """Bounding box and sphere of each shape, in the units of its file.

    They are relative to the file's origin, or, if the shape is far from that origin or a
    ``ShapeSampler`` has stored its points, to the middle of the shape's bounding box.

    Attributes:
        low_S3: lower corner of each bounding box; ``high_S3`` is the upper one.
        center_S3: mean of each shape's points.
        radius_S: distance from ``center_S3`` to the farthest point.
        origin_S3: point subtracted from each shape's coordinates, in double precision, so that
            shapes far from the file's origin keep their form; None: 0 for all shapes.
    """

    low_S3: FloatArray
    high_S3: FloatArray
    center_S3: FloatArray
    radius_S: FloatArray
    origin_S3: ExactArray | None = None


@dataclass(frozen=True, slots=True)
class PointSet:
    """Point clouds of one split.

    A coordinate is ``offset + step * value - origin``, with the stored value and the origin of
    ``frames``; ``step`` and ``offset`` differ by shape and axis if points are quantised to the
    shape's bounding box.

    Attributes:
        points: stored points [entries, P, 3] of an integer or float type, mapped or in memory.
        rows_S: index of each shape's entry in ``points``; corrupt files have entries there too.
        offset_S3: coordinate of the stored value 0 on each axis, before ``origin`` is subtracted.
        step_S3: difference in coordinate of one stored unit on each axis.
        frames: bounding boxes and spheres.
        labels_S: class numbers; -1 for shapes without labels.
        names: names of the shapes, such as ``chair_0042``.
        classes: class names, indexed by the labels.
        files: path of each shape's file; empty where shapes share files.
        counts_S: number of points in each cloud's file; if it is less than P, points are stored
            repeatedly. P for meshes; None: P for all shapes.

    Raises:
        DataError: a shape lies so far from the origin that ``frames`` lose its form.
    """

    points: StoredArray
    rows_S: IntArray
    offset_S3: FloatArray | ExactArray
    step_S3: FloatArray | ExactArray
    frames: Frames
    labels_S: IntArray
    names: tuple[str, ...]
    classes: tuple[str, ...]
    files: tuple[str, ...] = ()
    counts_S: IntArray | None = None

    def __post_init__(self) -> None:
        frames = self.frames
        lost_S = _is_far(frames.low_S3, frames.high_S3, times=_LOST)
        lost_S &= frames.radius_S > 0  # a single point has no form
        if lost_S.any():
            index = int(np.flatnonzero(lost_S)[0])
            raise DataError(
                f"single precision loses the form of {int(lost_S.sum())} of {len(lost_S)} shapes "
                f"that are far from the origin, such as {self.names[index]}",
                remedy="measure frames with sparsepipe.data.points.measure_frames, which subtracts "
                "the middle of each shape, or subtract an offset from the coordinates",
            )

    def __len__(self) -> int:
        return len(self.rows_S)

    @property
    def points_per_shape(self) -> int:
        """P, the number of points stored for each shape."""
        return int(self.points.array.shape[1])

    def cloud(self, index: int, picked_N: IntArray | None = None) -> FloatArray:
        """Returns points [N, 3] of a shape: those stored at indices ``picked_N``; None: all P."""
        stored_P3 = self.points.array[self.rows_S[index]]
        if picked_N is not None:
            stored_P3 = stored_P3.take(picked_N, axis=0)  # takes a third of the time of indexing
        step_3, offset_3 = self.step_S3[index], self.offset_S3[index]
        origin_S3 = self.frames.origin_S3
        if origin_S3 is not None and origin_S3[index].any():
            exact_N3: ExactArray = (
                stored_P3.astype(np.float64) * step_3 + offset_3 - origin_S3[index]
            )
            return exact_N3.astype(np.float32)
        cloud_N3: FloatArray = stored_P3.astype(np.float32)
        cloud_N3 *= step_3.astype(np.float32)
        cloud_N3 += offset_3.astype(np.float32)
        return cloud_N3


_FAR, _LOST = 16, 4096
"""Distances from the origin, in halves of a shape's longest side. Beyond the first, rounding errors
exceed 2^-20 of that, so the origin is moved; beyond the second, they would shift voxels at 50^3.
"""
_COARSE = 1e-3
"""Rounding of stored points, as a share of a shape's longest side, above which the log warns."""


def measure_frames(
    points_SP3: NDArray[Any], scale: float, *, offset_S3: ExactArray | None = None
) -> Frames:
    """Measures the frames of clouds whose coordinates are ``points_SP3 * scale + offset_S3``.

    Frames of shapes far from the origin are relative to the middle of their box. The log warns if
    points, such as map coordinates in single precision, are rounded too coarsely for a shape.
    """
    parts: list[tuple[NDArray[Any], ...]] = []
    for start in range(0, len(points_SP3), _CHUNK_SHAPES):
        rows = slice(start, start + _CHUNK_SHAPES)
        chunk_BP3 = points_SP3[rows].astype(np.float64) * scale
        if offset_S3 is not None:
            chunk_BP3 += offset_S3[rows, None]
        center_B13 = chunk_BP3.mean(axis=1, keepdims=True)
        radius_B = np.sqrt(np.square(chunk_BP3 - center_B13).sum(axis=2).max(axis=1))
        parts.append((chunk_BP3.min(axis=1), chunk_BP3.max(axis=1), center_B13[:, 0], radius_B))
    low_S3, high_S3, center_S3, radius_S = map(np.concatenate, zip(*parts, strict=True))
    if (dtype := points_SP3.dtype).kind == "f":
        without_S3 = 0.0 if offset_S3 is None else offset_S3
        farthest_S3 = np.maximum(np.abs(low_S3 - without_S3), np.abs(high_S3 - without_S3)) / scale
        steps_S = np.spacing(farthest_S3.max(axis=1).astype(dtype)).astype(np.float64) * scale
        coarse_S = steps_S > _COARSE * (high_S3 - low_S3).max(axis=1)
        if coarse_S.any():
            text = (
                "points of %d of %d shapes in %s are so far from the origin that they are rounded "
                "to steps of up to %.2g: subtract an offset before storing them, or use float64"
            )
            _LOG.warning(text, int(coarse_S.sum()), len(coarse_S), dtype, steps_S.max())
    far_S = _is_far(low_S3, high_S3, times=_FAR)
    origin_S3 = np.where(far_S[:, None], (low_S3 + high_S3) / 2, 0.0)
    low, high, center = (
        (exact_S3 - origin_S3).astype(np.float32) for exact_S3 in (low_S3, high_S3, center_S3)
    )
    return Frames(
        low, high, center, radius_S.astype(np.float32), origin_S3 if far_S.any() else None
    )


def _is_far(low_S3: NDArray[Any], high_S3: NDArray[Any], *, times: float) -> NDArray[np.bool_]:
    """Whether each shape's middle is farther from 0 than ``times`` half its longest side: [S]."""
    half_S = (high_S3.astype(np.float64) - low_S3).max(axis=1) / 2
    middle_S = np.abs(high_S3.astype(np.float64) + low_S3).max(axis=1) / 2
    far_S: NDArray[np.bool_] = middle_S > times * half_S
    return far_S
