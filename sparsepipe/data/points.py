"""Point clouds of a split: stored points memory-mapped, bounding boxes and labels in memory.

Shapes: S shapes of a split, P points stored per shape, N points in use, B clouds in a batch, T
points of all of them, 3 axes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
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


@dataclass(slots=True, eq=False)
class Clouds:
    """Clouds of a batch, one after the other, whose points are changed in place.

    Attributes:
        points_3T: coordinates, axis by axis, since numpy is several times faster along points.
        counts: number of points of each cloud, at least 1.
    """

    points_3T: FloatArray
    counts: Sequence[int]

    def parts(self) -> Iterator[slice]:
        """Yields where the points of each cloud are."""
        for start, stop in pairwise(accumulate(self.counts, initial=0)):
            yield slice(start, stop)

    def apply(self, operation: np.ufunc, values_B3: FloatArray) -> None:
        """Replaces each cloud's points by ``operation(points, values)``, where ``values`` is the
        cloud's row of ``values_B3``, float32: a value for each axis, or one for all, [B, 1].
        """
        for part, values_3 in zip(self.parts(), values_B3, strict=True):
            points_3N = self.points_3T[:, part]
            operation(points_3N, values_3[:, None], out=points_3N)

    def keep(self, kept_T: NDArray[np.bool_], *, least: slice) -> None:
        """Removes points that are not in ``kept_T``; a cloud without any keeps ``least``."""
        counts = list[int]()
        for part in self.parts():
            if not kept_T[part].any():
                kept_T[part][least] = True
            counts.append(int(np.count_nonzero(kept_T[part])))
        self.counts = counts
        if sum(counts) < len(kept_T):
            self.points_3T = self.points_3T.take(np.flatnonzero(kept_T), axis=1)


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

    def cloud(self, index: int) -> FloatArray:
        """Returns all points [P, 3] stored for a shape."""
        return self.clouds([index], [None]).points_3T.T

    def clouds(self, indices: Sequence[int], picked: Sequence[IntArray | None]) -> Clouds:
        """Returns clouds of shapes: of each, the points stored at ``picked``; None: all P."""
        counts = [self.points_per_shape if each is None else len(each) for each in picked]
        clouds = Clouds(np.empty((3, sum(counts)), np.float32), counts)
        step_B3 = self.step_S3[list(indices)].astype(np.float32)
        offset_B3 = self.offset_S3[list(indices)].astype(np.float32)
        origin_S3 = self.frames.origin_S3
        for place, (index, part) in enumerate(zip(indices, clouds.parts(), strict=True)):
            stored_P3, picked_N = self.points.array[self.rows_S[index]], picked[place]
            if picked_N is not None:
                if len(picked_N) > len(stored_P3) // 16:
                    stored_P3 = stored_P3.copy()  # reads all in order, which is much faster
                stored_P3 = stored_P3.take(picked_N, axis=0)  # a third of the time of indexing
            if origin_S3 is not None and origin_S3[index].any():
                exact_N3 = stored_P3.astype(np.float64) * self.step_S3[index]
                stored_P3 = exact_N3 + self.offset_S3[index] - origin_S3[index]
                step_B3[place], offset_B3[place] = 1.0, -0.0  # which change nothing, not even -0
            clouds.points_3T[:, part] = stored_P3.T
        clouds.apply(np.multiply, step_B3)
        clouds.apply(np.add, offset_B3)
        return clouds


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
