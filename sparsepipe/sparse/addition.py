"""The sum of two sparse tensors, site by site: what a residual connection needs."""

from __future__ import annotations

import torch

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse.tensor import SparseTensor


def add(x: SparseTensor, y: SparseTensor) -> SparseTensor:
    """``x + y``, of tensors on the same sites in the same order; keeps the cache of ``x``.

    Tensors that layers with equal windows make of one tensor share their coordinates, so that
    nothing is compared; other coordinates are, which waits for the device.

    Raises:
        CoordinateError: they differ in stride, grid, sites or channels.
    """
    if x.stride != y.stride or len(x) != len(y) or x.batch_size != y.batch_size:
        raise CoordinateError(
            f"a sum of {len(x)} sites of stride {x.stride} in {x.batch_size} samples and "
            f"{len(y)} of stride {y.stride} in {y.batch_size}",
            remedy="give both paths windows that lead to the same sites, such as kernel size 2 "
            "with stride 2, or no stride",
        )
    if x.spatial_shape != y.spatial_shape:
        raise CoordinateError(
            f"a sum of tensors on grids of {x.spatial_shape} and {y.spatial_shape}",
            remedy="give both paths the same windows, and both tensors the same spatial_shape",
        )
    if x.coords is not y.coords and not torch.equal(x.coords, y.coords):
        raise CoordinateError(
            "a sum of tensors whose sites differ, or come in another order",
            remedy="give both paths the same windows",
        )
    if x.num_channels != y.num_channels:
        raise CoordinateError(
            f"a sum of {x.num_channels} and {y.num_channels} channels",
            remedy="bring both to as many, by a convolution of kernel size 1",
        )
    return x.replace_feats(x.feats + y.feats)
