"""Voxelisation: the grid around a shape, the voxels that points occupy, and dense occupancy.

Shapes: N points, T points of all samples, M occupied voxels, B samples in a batch, R voxels along
each side of the grid.

``span`` chooses the box that is mapped to the unit cube [-1, 1]^3, which the grid divides:
``extent``, the shape's bounding box with each axis stretched to the whole grid, as in the
SparsePipe paper (4,096 points on ModelNet40 then fill about 7.6 % of 32^3 and 2.6 % of 50^3, as
printed there); ``cube``, the cube around the middle of that box with its longest side; or
``sphere``, the cube around the bounding sphere about the points' mean, which leaves room for
augmentation and does not change when the shape is rotated. Cube and sphere keep proportions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.points import FloatArray

Span = Literal["extent", "cube", "sphere"]

_TABLE_VOXELS = 2**18
"""Up to this many voxels, a table of flags is faster than sorting the points' voxel numbers."""

_FLAT = 1e-6
"""Along an axis shorter than this share of the longest, all points lie in the grid's middle."""


def grid_box(
    low_B3: FloatArray, high_B3: FloatArray, center_B3: FloatArray, radius_B: Any, *, span: Span
) -> tuple[FloatArray, FloatArray]:
    """Returns middle [B, 3] and half widths [B, 3] (never 0) of the grids around shapes.

    A shape's bounding box is from ``low_B3`` to ``high_B3``, its sphere has ``radius_B`` about
    ``center_B3``. A single shape needs no dimension B.
    """
    tiny = np.finfo(np.float32).tiny
    if span == "sphere":
        half_B = np.maximum(np.asarray(radius_B, np.float32), tiny)
        return center_B3, np.broadcast_to(half_B[..., None], center_B3.shape)
    middle_B3 = (low_B3 + high_B3) * np.float32(0.5)
    half_B3 = (high_B3 - low_B3) * np.float32(0.5)
    longest_B1 = np.maximum(half_B3.max(axis=-1, keepdims=True), tiny)
    if span == "cube":
        return middle_B3, np.broadcast_to(longest_B1.astype(np.float32), half_B3.shape)
    flat_B1 = (_FLAT * longest_B1.astype(np.float64)).astype(half_B3.dtype)
    return middle_B3, np.where(half_B3 > flat_B1, half_B3, longest_B1).astype(np.float32)


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
    keys_N = voxel_numbers(unit_N3, resolution=resolution)
    return occupied_sites(keys_N, [slice(None)], resolution=resolution)[:, 1:]


def voxel_numbers(unit_N3: NDArray[np.floating], *, resolution: int) -> NDArray[Any]:
    """Returns the number (x R + y) R + z [N] of each point's voxel; see :func:`voxelise`."""
    # Float32 is too coarse for the voxels of a very fine grid.
    exact_N3 = unit_N3 if resolution <= 1024 else unit_N3.astype(np.float64)
    scaled_N3 = exact_N3 + 1
    scaled_N3 *= resolution / 2
    np.clip(scaled_N3, 0, resolution - 1, out=scaled_N3)
    sites_N3 = scaled_N3.astype(np.int32 if resolution**3 <= 2**31 else np.int64)
    keys_N: NDArray[Any] = sites_N3[:, 0]
    for axis in (1, 2):
        keys_N = keys_N * resolution + sites_N3[:, axis]
    return keys_N


def occupied_sites(
    keys_T: NDArray[Any], parts: Iterable[slice], *, resolution: int
) -> NDArray[np.int32]:
    """Returns distinct voxels [M, 4] as (sample, x, y, z), in lexicographic order.

    ``keys_T``: voxels of points, as from :func:`voxel_numbers`; ``parts``: where each sample's are.
    """
    has_table = resolution**3 <= _TABLE_VOXELS
    flags = np.zeros(-(-(resolution**3) // 8) * 8 if has_table else 0, np.bool_)
    flags_of_8, found = flags.view(np.uint64), list[NDArray[Any]]()
    for part in parts:
        if has_table:
            flags[keys_T[part].astype(np.intp)] = True
            # Where a flag is set is hard to predict, so that searching in two steps is faster.
            eights = (flags_of_8 != 0).nonzero()[0]
            places_M = flags_of_8[eights].view(np.bool_).nonzero()[0]
            flags_of_8[eights] = 0
            eights -= np.arange(len(eights))
            found.append((eights * 8)[places_M >> 3] + places_M)
        else:
            keys_N = np.sort(keys_T[part])
            first_N = np.ones(len(keys_N), np.bool_)
            np.not_equal(keys_N[1:], keys_N[:-1], out=first_N[1:])
            found.append(keys_N[first_N])
    keys_M = np.concatenate(found).astype(keys_T.dtype, copy=False)
    sites_M4 = np.empty((len(keys_M), 4), np.int32)
    sites_M4[:, 0] = np.repeat(np.arange(len(found)), [len(each) for each in found])
    for axis in (3, 2, 1):
        rest_M = keys_M // resolution  # np.divmod takes several times as long
        sites_M4[:, axis] = keys_M - rest_M * resolution
        keys_M = rest_M
    return sites_M4


def occupancy(coords_M3: NDArray[np.int32], *, resolution: int) -> FloatArray:
    """Returns a dense grid [1, R, R, R] with 1 in occupied voxels and 0 elsewhere."""
    grid = np.zeros((1, resolution, resolution, resolution), np.float32)
    grid[0, coords_M3[:, 0], coords_M3[:, 1], coords_M3[:, 2]] = 1.0
    return grid
