"""Readers that compute what the cache holds of a shape: points of it, or voxels of its surface.

Shapes: F faces, P points, Q points of a cloud, L lattice points, R voxels along each side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.formats import read_shape, triangle_areas
from sparsepipe.data.formats.off import READER_VERSION
from sparsepipe.data.points import FloatArray, Frames, PointSet, StoredArray
from sparsepipe.data.voxels import Span, grid_box
from sparsepipe.errors import DataError

QUANTA = 65_535
"""Steps of a quantised coordinate across the shape's bounding box: 16 bits, half of float32.

Rounding moves a point by at most 1/131,070 of the extent, 1/655 of a voxel at 200^3; float16, of
equal size, would be wrong by up to 1/20 of such a voxel near the far faces.
"""

FRAME_NUMBERS = 10
"""Count of a frame's numbers: lower corner (3), upper corner (3), mean of the points (3), radius
about the mean (1). They are relative to the middle of the box, because single precision would
distort a shape far from the origin."""

_LATTICE_VOXELS = 0.25
_LATTICE_CHUNK = 1 << 20

Triangles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ShapeSampler:
    """Samples points from a cloud or, uniformly, from a mesh's surface, and quantises them.

    The file's content seeds the sampling, so that files' order, paths and workers have no effect.
    From a cloud of more than P points, P are drawn; the points of a smaller cloud are repeated.

    Attributes:
        points: P, the number of points for each shape.
        seed: seed of the sampling, besides the file's digest.
        first: whether a cloud's first P points, and their box, are used instead of P drawn points.
    """

    kind: ClassVar[str] = "points"
    dtype: ClassVar[str] = "<u2"
    meta_size: ClassVar[int] = FRAME_NUMBERS + 1
    points: int
    seed: int
    first: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of what is cached for a file: [P, 3]."""
        return (self.points, 3)

    def settings(self) -> dict[str, Any]:
        """Returns the settings and versions that, with a file's content, determine its points."""
        return {
            "reader": READER_VERSION,
            "algorithm": "area-weighted 2, clouds 3",
            "points": self.points,
            "seed": self.seed,
            "first": self.first,
        }

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[np.uint16], FloatArray]:
        """Returns a file's quantised points [P, 3], and an array [11]: frame, number of points."""
        return self.quantised(read_shape(path), digest)

    def quantised(
        self, values: NDArray[np.float64], digest: str
    ) -> tuple[NDArray[np.uint16], FloatArray]:
        """Returns the same as ``__call__`` for a shape's triangles [F, 3, 3] or points [Q, 3]."""
        count = self.points if values.ndim == 3 else len(values)
        if values.ndim == 3:
            row_P3, frame = quantise(*self.sample(values, digest))
        elif self.first:
            first_P3 = values[np.arange(self.points) % count]
            row_P3, frame = quantise(first_P3, first_P3.min(axis=0), first_P3.max(axis=0))
        else:
            rng = np.random.default_rng([self.seed, int(digest, 16)])
            passes = -(-self.points // count)
            drawn_P = np.concatenate([rng.permutation(count) for _ in range(passes)])[: self.points]
            row_P3, frame = quantise(values[drawn_P], values.min(axis=0), values.max(axis=0))
        return row_P3, np.append(frame, np.float32(count))

    def sample(
        self, triangles_F33: Triangles, digest: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns points [P, 3] sampled on triangles, and the two corners of the triangles' box."""
        rng = np.random.default_rng([self.seed, int(digest, 16)])
        points_P3 = sample_triangles(triangles_F33, self.points, rng)
        return points_P3, triangles_F33.min(axis=(0, 1)), triangles_F33.max(axis=(0, 1))


def sample_triangles(
    triangles_F33: Triangles, count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draws ``count`` independent points [P, 3], uniformly over the area of all triangles."""
    cumulative_F = np.cumsum(triangle_areas(triangles_F33))
    chosen_P = np.searchsorted(cumulative_F, rng.random(count) * cumulative_F[-1], side="right")
    corner_P3, second_P3, third_P3 = triangles_F33[chosen_P].transpose(1, 0, 2)
    along_P2 = rng.random((count, 2))
    # Points in the far half of the parallelogram are reflected into the triangle.
    beyond_P = along_P2.sum(axis=1) > 1
    along_P2[beyond_P] = 1 - along_P2[beyond_P]
    points_P3: NDArray[np.float64] = (
        corner_P3
        + along_P2[:, :1] * (second_P3 - corner_P3)
        + along_P2[:, 1:] * (third_P3 - corner_P3)
    )
    return points_P3


def quantise(
    points_P3: NDArray[np.float64], low_3: NDArray[np.float64], high_3: NDArray[np.float64]
) -> tuple[NDArray[np.uint16], FloatArray]:
    """Returns points as steps 0 to ``QUANTA`` from ``low_3`` to ``high_3``, and the frame [10]."""
    size_3 = high_3 - low_3
    steps_P3 = (points_P3 - low_3) * (QUANTA / np.where(size_3 > 0, size_3, 1.0))
    middle_3 = (low_3 + high_3) / 2
    moved_P3 = points_P3 - middle_3
    center_3 = moved_P3.mean(axis=0)
    radius = np.sqrt(np.square(moved_P3 - center_3).sum(axis=1).max())
    frame = np.concatenate([low_3 - middle_3, high_3 - middle_3, center_3, [radius]])
    frame = frame.astype(np.float32)
    return np.clip(np.rint(steps_P3), 0, QUANTA).astype(np.uint16), frame


def quantised_points(points: StoredArray, meta_SK: FloatArray, **of_shapes: Any) -> PointSet:
    """Returns a ``ShapeSampler``'s points and numbers as a point set with fields ``of_shapes``."""
    low_S3, high_S3 = meta_SK[:, 0:3], meta_SK[:, 3:6]
    return PointSet(
        points=points,
        offset_S3=low_S3,
        step_S3=((high_S3 - low_S3) / np.float32(QUANTA)).astype(np.float32),
        frames=Frames(low_S3, high_S3, meta_SK[:, 6:9], meta_SK[:, 9]),
        counts_S=meta_SK[:, FRAME_NUMBERS].astype(np.int64),
        **of_shapes,
    )


@dataclass(frozen=True, slots=True)
class SurfaceVoxels:
    """Computes which voxels a mesh's surface passes through, a bit for each voxel.

    As in Kaolin's conversion of triangle meshes, the surface is subdivided more finely than the
    grid, here into a lattice with a spacing of at most a quarter of a voxel, and every voxel that
    contains a lattice point is occupied.

    Attributes:
        sampler: sampler of points on the same shapes, so that both use the same box.
        resolution: R, voxels along each side.
        span: box that the grid divides.
    """

    kind: ClassVar[str] = "surfaces"
    dtype: ClassVar[str] = "|u1"  # packed bits
    meta_size: ClassVar[int] = 0
    sampler: ShapeSampler
    resolution: int
    span: Span

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of what is cached for a file: [ceil(R^3 / 8)], bytes of packed bits."""
        return (-(-(self.resolution**3) // 8),)

    def settings(self) -> dict[str, Any]:
        """Returns the settings and versions that, with a file's content, determine its voxels."""
        # Only the sphere depends on the sampled points, through their mean.
        sampler = self.sampler.settings() if self.span == "sphere" else None
        return {
            "reader": READER_VERSION,
            "algorithm": "lattice 2",
            "resolution": self.resolution,
            "span": self.span,
            "sampler": sampler,
        }

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[np.uint8], FloatArray]:
        """Returns a mesh's packed occupancy [ceil(R^3 / 8)], and no further numbers, as K is 0.

        ``digest``, of the file, seeds the sampled points, on whose mean a ``sphere`` depends.
        """
        values = read_shape(path)
        if values.ndim == 2:
            raise DataError(f"{path} is a cloud without a surface", remedy="replace it with a mesh")
        return self.packed(values, digest), np.empty(0, np.float32)

    def packed(self, triangles_F33: Triangles, digest: str) -> NDArray[np.uint8]:
        """Returns the packed occupancy [ceil(R^3 / 8)] of triangles; ``digest`` is their file's."""
        points_P3, low_3, high_3 = self.sampler.sample(triangles_F33, digest)
        _, frame = quantise(points_P3, low_3, high_3)
        triangles_F33 = triangles_F33 - (low_3 + high_3) / 2  # as the frame is
        middle_3, half_3 = grid_box(
            frame[:3], frame[3:6], frame[6:9], float(frame[9]), span=self.span
        )
        side = self.resolution
        table = np.zeros(side**3, np.bool_)
        for points_L3 in surface_lattice((triangles_F33 - middle_3) / half_3 * (side / 2)):
            sites_L3 = np.clip(points_L3 + side / 2, 0, side - 1).astype(np.int64)
            table[(sites_L3[:, 0] * side + sites_L3[:, 1]) * side + sites_L3[:, 2]] = True
        return np.packbits(table)


def surface_lattice(triangles_F33: Triangles) -> Iterator[NDArray[np.float64]]:
    """Yields chunks of points [L, 3] on triangles, at most a quarter of a voxel (length 1) apart.

    Lines of points follow a triangle's shortest edge, so that slivers get no more than they need.
    """
    lengths_F3 = np.linalg.norm(np.roll(triangles_F33, -1, axis=1) - triangles_F33, axis=2)
    shortest_F = lengths_F3.argmin(axis=1)
    faces_F = np.arange(len(triangles_F33))
    first_F3 = triangles_F33[faces_F, shortest_F]
    second_F3 = triangles_F33[faces_F, (shortest_F + 1) % 3]
    apex_F3 = triangles_F33[faces_F, (shortest_F + 2) % 3]
    rows_F = np.ceil(lengths_F3.max(axis=1) / _LATTICE_VOXELS).astype(np.int64) + 1
    across_F = np.ceil(lengths_F3.min(axis=1) / _LATTICE_VOXELS).astype(np.int64) + 1
    counts_F = rows_F * across_F
    portions_F = np.cumsum(counts_F) // _LATTICE_CHUNK
    for portion in np.unique(portions_F):
        chosen_F = np.flatnonzero(portions_F == portion)
        faces_L = np.repeat(chosen_F, counts_F[chosen_F])
        starts_F = np.cumsum(counts_F[chosen_F]) - counts_F[chosen_F]
        place_L = np.arange(len(faces_L)) - np.repeat(starts_F, counts_F[chosen_F])
        row_L, column_L = np.divmod(place_L, across_F[faces_L])
        down_L1 = (row_L / np.maximum(rows_F[faces_L] - 1, 1))[:, None]
        along_L1 = (column_L / np.maximum(across_F[faces_L] - 1, 1))[:, None]
        base_L3 = first_F3[faces_L] * (1 - along_L1) + second_F3[faces_L] * along_L1
        yield apex_F3[faces_L] * (1 - down_L1) + base_L3 * down_L1
