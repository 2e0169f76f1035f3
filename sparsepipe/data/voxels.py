"""Voxelisation: the grid around a shape, the voxels that points occupy, and dense occupancy.

Shapes: N points, M occupied voxels, R voxels along each side of the grid.

``span`` chooses the box that is mapped to the unit cube [-1, 1]^3, which the grid divides:
``extent``, the shape's bounding box with each axis stretched to the whole grid, as in the
SparsePipe paper (4,096 points on ModelNet40 then fill about 7.6 % of 32^3 and 2.6 % of 50^3, as
printed there); ``cube``, the cube around the middle of that box with its longest side; or
``sphere``, the cube around the bounding sphere about the points' mean, which leaves room for
augmentation and does not change when the shape is rotated. Cube and sphere keep proportions.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.points import FloatArray

Span = Literal["extent", "cube", "sphere"]

_TABLE_VOXELS = 2**18
"""Up to this many voxels, a table of flags is faster than sorting the points' voxel numbers."""

_FLAT = 1e-6
"""Along an axis shorter than this share of the longest, all points lie in the grid's middle."""


def grid_box(
    low_3: FloatArray, high_3: FloatArray, center_3: FloatArray, radius: float, *, span: Span
) -> tuple[FloatArray, FloatArray]:
    """Returns middle [3] and half widths [3] (never 0) of the grid around a shape.

    Its bounding box is from ``low_3`` to ``high_3``, its sphere has ``radius`` about ``center_3``.
    """
    if span == "sphere":
        return center_3, np.full(3, max(radius, np.finfo(np.float32).tiny), np.float32)
    middle_3 = (low_3 + high_3) * np.float32(0.5)
    half_3 = (high_3 - low_3) * np.float32(0.5)
    longest = max(float(half_3.max()), float(np.finfo(np.float32).tiny))
    if span == "cube":
        return middle_3, np.full(3, longest, np.float32)
    return middle_3, np.where(half_3 > _FLAT * longest, half_3, longest).astype(np.float32)


def voxelise(unit_N3: NDArray[np.floating], *, resolution: int) -> NDArray[np.int32]:
    """Returns the voxels that points in the unit cube occupy.

    A voxel includes its lower faces but not its upper ones, except at the grid's border.
    Points outside the grid are assigned to the nearest voxel.

    Args:
        unit_N3: points, in [-1, 1] on each axis if inside the grid.
        resolution: R, voxels along each side, 1 to 2^21.

    Returns:
        Distinct voxels [M, 3] as int32 (x, y, z), in lexicographic order.
    """
    # Float32 is too coarse for the voxels of a very fine grid.
    exact_N3 = unit_N3 if resolution <= 1024 else unit_N3.astype(np.float64)
    scaled_N3 = (exact_N3 + 1) * (resolution / 2)
    sites_N3 = np.clip(scaled_N3, 0, resolution - 1).astype(np.int64)
    keys_N = (sites_N3[:, 0] * resolution + sites_N3[:, 1]) * resolution + sites_N3[:, 2]
    if resolution**3 <= _TABLE_VOXELS:
        table = np.zeros(resolution**3, np.bool_)
        table[keys_N] = True
        keys_M = np.flatnonzero(table)
    else:
        keys_N.sort()
        first_N = np.ones(len(keys_N), np.bool_)
        np.not_equal(keys_N[1:], keys_N[:-1], out=first_N[1:])
        keys_M = keys_N[first_N]
    coords_M3 = np.empty((len(keys_M), 3), np.int32)
    rest_M, coords_M3[:, 2] = np.divmod(keys_M, resolution)
    coords_M3[:, 0], coords_M3[:, 1] = np.divmod(rest_M, resolution)
    return coords_M3


def occupancy(coords_M3: NDArray[np.int32], *, resolution: int) -> FloatArray:
    """Returns a dense grid [1, R, R, R] with 1 in occupied voxels and 0 elsewhere."""
    grid = np.zeros((1, resolution, resolution, resolution), np.float32)
    grid[0, coords_M3[:, 0], coords_M3[:, 1], coords_M3[:, 2]] = 1.0
    return grid
