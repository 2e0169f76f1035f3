"""Point clouds of a split: stored points memory-mapped, bounding boxes and labels in memory.

Shapes: S shapes of a split, P points stored per shape, N points in use, 3 axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

CHUNK_SHAPES = 256
"""Shapes in memory at once while frames are measured."""


class MappedArray:
    """A ``.npy`` file that is memory-mapped on first use in each process.

    Only the path is pickled, so that a loader's worker maps the same pages instead of
    receiving a copy of the array.

    Args:
        path: the ``.npy`` file.
    """

    __slots__ = ("_array", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._array: NDArray[Any] | None = None

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
class Frames:
    """Bounding box and sphere of each shape, in the units of its file.

    The origin is that of the file, or the middle of the shape's bounding box where meshes or
    text files were sampled.

    Attributes:
        low_S3: lower corner of the bounding box.
        high_S3: upper corner of the bounding box.
        center_S3: mean of the points.
        radius_S: distance from ``center_S3`` to the farthest point.
    """

    low_S3: FloatArray
    high_S3: FloatArray
    center_S3: FloatArray
    radius_S: FloatArray


@dataclass(frozen=True, slots=True)
class PointSet:
    """The point clouds of one split.

    A coordinate is ``offset + step * value`` of the stored value; ``step`` and ``offset`` differ
    per shape and axis if points are quantised to the shape's own box.

    Attributes:
        points: stored points [R, P, 3] of any integer or float type, memory-mapped.
        rows_S: each shape's row in ``points`` (rows of excluded files are skipped).
        offset_S3: coordinate of the stored value 0.
        step_S3: length of one stored unit.
        frames: bounding boxes and spheres.
        labels_S: class numbers.
        names: names of the shapes, such as ``chair_0042``.
        classes: class names, indexed by the labels.
    """

    points: MappedArray
    rows_S: IntArray
    offset_S3: FloatArray
    step_S3: FloatArray
    frames: Frames
    labels_S: IntArray
    names: tuple[str, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows_S)

    @property
    def points_per_shape(self) -> int:
        """P, the number of points stored for each shape."""
        return int(self.points.array.shape[1])

    def cloud(self, index: int, picked_N: IntArray | None = None) -> FloatArray:
        """Points [N, 3] of a shape at positions ``picked_N``, or all of them."""
        stored_P3 = self.points.array[self.rows_S[index]]
        if picked_N is not None:
            stored_P3 = stored_P3[picked_N]
        cloud_N3: FloatArray = stored_P3.astype(np.float32)
        cloud_N3 *= self.step_S3[index]
        cloud_N3 += self.offset_S3[index]
        return cloud_N3


def measure_cloud(points_P3: NDArray[Any]) -> tuple[FloatArray, float]:
    """Mean [3] of a cloud and the distance from it to the farthest point."""
    center_3 = points_P3.mean(axis=0, dtype=np.float64)
    radius = np.sqrt(np.square(points_P3 - center_3).sum(axis=1).max())
    return center_3.astype(np.float32), float(radius)


def measure_frames(points_SP3: NDArray[Any], scale: float) -> Frames:
    """Frames of clouds with a common scale, computed in chunks."""
    parts: list[tuple[NDArray[Any], ...]] = []
    for start in range(0, len(points_SP3), CHUNK_SHAPES):
        chunk_BP3 = points_SP3[start : start + CHUNK_SHAPES].astype(np.float64) * scale
        center_B13 = chunk_BP3.mean(axis=1, keepdims=True)
        radius_B = np.sqrt(np.square(chunk_BP3 - center_B13).sum(axis=2).max(axis=1))
        parts.append((chunk_BP3.min(axis=1), chunk_BP3.max(axis=1), center_B13[:, 0], radius_B))
    low, high, center, radius = (
        np.concatenate(column).astype(np.float32) for column in zip(*parts, strict=True)
    )
    return Frames(low, high, center, radius)
