"""From points to voxels and back, with gradients.

Shape suffixes: P points, Q points within a grid, N sites, K corners of a cell, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.coordinates import check_bounds, coords_of_keys, linear_keys
from sparsepipe.sparse.kernel_map import CoordinateCache
from sparsepipe.sparse.kernel_spec import as_triple
from sparsepipe.sparse.row_sums import RowSums
from sparsepipe.sparse.tensor import SparseTensor
from sparsepipe.utils.arguments import checked


@checked
def voxelize(
    coords_P3: Tensor,
    feats_PC: Tensor,
    *,
    voxel_size: float | Sequence[float],
    batch_P: Tensor | None = None,
    batch_size: int | None = None,
    spatial_shape: int | Sequence[int] | None = None,
    reduce: Literal["mean", "first"] = "mean",
) -> tuple[SparseTensor, Tensor]:
    """Puts points into voxels: the point ``p`` into the voxel ``floor(p / voxel_size)``.

    Args:
        coords_P3: floating-point positions [P, 3], at least 0.
        feats_PC: their floating-point features [P, C].
        voxel_size: edge of a voxel in the unit of the positions, for all axes or for each.
        batch_P: integers [P], the sample of each point; None: all points are of one sample.
        batch_size: number of samples; None: the largest of ``batch_P`` plus one.
        spatial_shape: extent of the grid in voxels; None: unknown.
        reduce: "mean" of the features in a voxel, or those of the "first" point in it.

    Returns:
        The voxels in lexicographic order, and the row of each point's voxel, int64 [P]. A voxel's
        gradient goes to its points in equal shares, or to the first.

    Raises:
        CoordinateError: the shapes do not fit, or positions are not finite, below 0 or out of the
            grid.
        ConfigError: ``reduce`` is another word.
    """
    places_P3, batch_P1 = _in_voxels(coords_P3, voxel_size, batch_P)
    if feats_PC.dim() != 2 or len(feats_PC) != len(coords_P3):
        raise CoordinateError(
            f"features of shape {tuple(feats_PC.shape)} do not belong to {len(coords_P3)} points",
            remedy="give floating-point features [P, C], one row for each point",
        )
    if batch_size is None:
        batch_size = 1 if batch_P is None else int(batch_P.max()) + 1 if len(batch_P) else 0
    shape = None if spatial_shape is None else as_triple(spatial_shape, name="spatial_shape")
    sites_P4 = torch.cat([batch_P1, places_P3.floor().long()], dim=1)
    extent = check_bounds(sites_P4, batch_size=batch_size, spatial_shape=shape)
    keys_N, rows_P = torch.unique(linear_keys(sites_P4, extent), return_inverse=True)
    coords_N4 = coords_of_keys(keys_N, extent)
    points_P = torch.arange(len(rows_P), device=rows_P.device)
    means = RowSums.of(
        points_P, rows_P, num_sources=len(rows_P), num_targets=len(keys_N), is_mean=True
    )
    takes_first = reduce == "first"
    feats_NC = feats_PC.index_select(0, means.first_terms_M) if takes_first else means(feats_PC)
    cache = CoordinateCache(coords_N4, batch_size=batch_size, spatial_shape=shape)
    cache.pass_checks(extent)
    x = SparseTensor(feats_NC, coords_N4, spatial_shape=shape, batch_size=batch_size, cache=cache)
    return x, rows_P


@checked
def devoxelize(
    x: SparseTensor,
    coords_P3: Tensor,
    *,
    voxel_size: float | Sequence[float],
    batch_P: Tensor | None = None,
    mode: Literal["nearest", "trilinear"] = "nearest",
) -> Tensor:
    """Returns features at points [P, C]: 0 where there is no site to take them from.

    Gradients go to the features of ``x``, not to positions.

    Args:
        x: features on voxels of any stride.
        coords_P3: floating-point positions [P, 3], as of :func:`voxelize`.
        voxel_size: edge of a voxel of stride 1, as of :func:`voxelize`.
        batch_P: the sample of each point, as of :func:`voxelize`.
        mode: "nearest" takes the features of the voxel in which a point lies; "trilinear" weighs
            those of the eight voxels whose centres are around it, divided by the sum of the weights
            of those that exist.

    Raises:
        CoordinateError: the shapes do not fit, or positions are not finite.
        ConfigError: ``mode`` is another word.
    """
    places_P3, batch_P1 = _in_voxels(coords_P3, voxel_size, batch_P)
    stride_3 = torch.tensor(x.stride, device=x.device)
    extent_3 = torch.tensor(x.cache.extent, device=x.device)
    if mode == "nearest":
        corners, lowest = [(0, 0, 0)], 0
        base_P3 = places_P3.floor().long().div(stride_3, rounding_mode="floor")
        weights_KP = places_P3.new_ones(1, len(places_P3))
    else:
        corners, lowest = [(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)], -1
        centred_P3 = places_P3 / stride_3 - 0.5
        base_P3 = centred_P3.floor().long()
        above_P3 = centred_P3 - base_P3
        sides = torch.stack([1 - above_P3, above_P3])
        weights_KP = torch.stack(
            [sides[i, :, 0] * sides[j, :, 1] * sides[k, :, 2] for i, j, k in corners]
        )
    inside_P = ((base_P3 >= lowest) & (base_P3 < extent_3)).all(1)
    inside_P &= (batch_P1[:, 0] >= 0) & (batch_P1[:, 0] < x.batch_size)
    points_Q = inside_P.nonzero()[:, 0]
    cells_Q4 = torch.cat([batch_P1, base_P3], dim=1).int().index_select(0, points_Q)
    offsets_K3 = torch.tensor(corners, dtype=torch.int32, device=x.device)
    rows_KQ = x.cache.site_index((1, 1, 1)).find(cells_Q4, offsets_K3)
    exists_KQ = rows_KQ >= 0
    weights_KQ = weights_KP.index_select(1, points_Q) * exists_KQ
    weights_KQ /= weights_KQ.sum(0).clamp_(min=torch.finfo(weights_KQ.dtype).tiny)
    sums = RowSums.of(
        rows_KQ[exists_KQ].long(),
        points_Q.expand_as(rows_KQ)[exists_KQ],
        num_sources=len(x),
        num_targets=len(coords_P3),
        weights_P=weights_KQ[exists_KQ],
    )
    return sums(x.feats)


def _in_voxels(
    coords_P3: Tensor, voxel_size: float | Sequence[float], batch_P: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns positions [P, 3] in voxels of stride 1, and samples, int64 [P, 1]."""
    if coords_P3.dim() != 2 or coords_P3.shape[1] != 3 or not coords_P3.is_floating_point():
        raise CoordinateError(
            f"positions are {coords_P3.dtype} {tuple(coords_P3.shape)}, not floating [P, 3]",
            remedy="give floating-point positions (x, y, z), and samples as batch_P",
        )
    if batch_P is not None and (
        batch_P.shape != coords_P3.shape[:1] or batch_P.is_floating_point()
    ):
        raise CoordinateError(
            f"batch_P is {batch_P.dtype} {tuple(batch_P.shape)}, not int [{len(coords_P3)}]",
            remedy="give one integer for each point",
        )
    edge = coords_P3.new_tensor(voxel_size)
    if not bool((edge > 0).all() & edge.isfinite().all() & coords_P3.isfinite().all()):
        raise CoordinateError(
            f"a position is not finite, or voxel_size={voxel_size} is not positive and finite",
            remedy="drop points without a position, and give the edge of a voxel in their unit",
        )
    if batch_P is None:
        batch_P = torch.zeros(len(coords_P3), dtype=torch.int64, device=coords_P3.device)
    return coords_P3.detach() / edge, batch_P.long()[:, None]
