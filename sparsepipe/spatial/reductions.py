"""Sums, means, maxima and losses over shards: results that all ranks have, and their adjoints.

The gradient of a value that all ranks have is partial on each, so that the adjoint of a sum over
ranks is a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsepipe.runtime.collectives.halo import add_up, largest, smallest
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    function_rule,
    local_of,
    own_part,
    shard_of,
    whole_shape,
    without_rule,
)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return add_up(value, grid.group, what="adding up over shards")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return add_up(gradient, ctx.grid.group, what="adding up gradients over shards"), None


class _Max(torch.autograd.Function):
    """The largest value of all ranks; of equal ones the first rank's gets the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid) -> Tensor:
        what = "finding the largest value of all shards"
        found = largest(value, grid.group, what=what)
        ranks = torch.where(value == found, grid.rank, grid.size)
        first = smallest(ranks, grid.group, what=what)
        ctx.grid = grid
        ctx.save_for_backward(first == grid.rank)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mine,) = ctx.saved_tensors
        whole = add_up(gradient, ctx.grid.group, what="adding up gradients over shards")
        return whole * mine, None


class _Leave(torch.autograd.Function):
    """Behind it all ranks compute the same; a P-th of the gradient of each is its part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        ctx.size = size
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


def leave(value: Tensor, grid: Grid) -> Tensor:
    """A value that all ranks have, for computing on with it as one device would."""
    result: Tensor = _Leave.apply(value, grid.size)  # type: ignore[no-untyped-call]
    return result


def over_shards(value: Tensor, grid: Grid) -> Tensor:
    """The sum over all ranks of the grid."""
    result: Tensor = _Sum.apply(value, grid)  # type: ignore[no-untyped-call]
    return result


def total(shard: Shard, dims: Sequence[int], how: Callable[..., Tensor]) -> Tensor:
    """The whole reduced over ``dims``, all cut ones among them; these are kept with one position.

    Args:
        shard: of the whole.
        dims: counted from the end.
        how: ``torch.sum``, ``torch.mean`` or ``torch.amax``.
    """
    local, grid = local_of(shard), shard.grid
    if how is torch.amax:
        shape = [1 if dim - local.dim() in dims else n for dim, n in enumerate(local.shape)]
        if local.numel():
            flat = local.movedim(list(dims), list(range(-len(dims), 0))).flatten(-len(dims))
            local_max = flat.max(-1).values.reshape(shape)
        else:
            local_max = local.new_full(shape, -math.inf) + local.sum()
        result: Tensor = _Max.apply(local_max, grid)  # type: ignore[no-untyped-call]
        return result
    summed = over_shards(local.sum(list(dims), keepdim=True), grid)
    if how is torch.sum:
        return summed
    return summed / math.prod(whole_shape(shard)[dim] for dim in dims)


def _dims_of(shard: Shard, dim: int | Sequence[int] | None) -> list[int]:
    """Reduced dimensions, counted from the end."""
    count = local_of(shard).dim()
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(-count, 0))
    return [
        each - count if each >= 0 else each for each in ([dim] if isinstance(dim, int) else dim)
    ]


def _reduced(
    how: Callable[..., Tensor], shard: Shard, dim: int | Sequence[int] | None, keepdim: bool
) -> Tensor:
    dims = _dims_of(shard, dim)
    cut = set(dims) & set(shard.dims)
    if cut and cut != set(shard.dims):
        raise without_rule("a reduction over some of the dimensions that are cut")
    if not cut:
        local = how(local_of(shard), dims, keepdim=True)
        kept = alike(local, shard)
        return kept if keepdim else _squeezed(kept, dims)
    result = total(shard, dims, how)
    if keepdim:
        return result
    places = sorted((d + result.dim() for d in dims), reverse=True)
    for place in places:
        result = result.squeeze(place)
    return result


def _squeezed(shard: Shard, dims: Sequence[int]) -> Shard:
    """Without ``dims``, none of which is cut and each of which has one position."""
    left = [dim for dim in range(-local_of(shard).dim(), 0) if dim not in dims]
    local = local_of(shard).squeeze(tuple(dims))
    moved_dims = [left.index(dim) - len(left) for dim in shard.dims]
    return shard_of(local, shard.grid, moved_dims, shard.full)


@function_rule(torch.sum, Tensor.sum)
def _sum(
    _: Any,
    input: Shard,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    found = _reduced(torch.sum, input, dim, keepdim)
    return found if dtype is None else found.to(dtype)


@function_rule(torch.mean, Tensor.mean)
def _mean(
    _: Any,
    input: Shard,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    found = _reduced(torch.mean, input, dim, keepdim)
    return found if dtype is None else found.to(dtype)


@function_rule(torch.amax, Tensor.amax)
def _amax(_: Any, input: Shard, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return _reduced(torch.amax, input, dim, keepdim)


@function_rule(torch.max, Tensor.max)
def _max(_: Any, input: Shard, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return _reduced(torch.amax, input, None, False)
    if _dims_of(input, dim)[0] in input.dims:
        raise without_rule("max with indices over a dimension that is cut")
    found = torch.max(local_of(input), dim, keepdim=True)
    parts = [alike(each, input) for each in found]
    return (
        tuple(parts) if keepdim else tuple(_squeezed(each, _dims_of(input, dim)) for each in parts)
    )


@function_rule(torch.argmax, Tensor.argmax)
def _argmax(_: Any, input: Shard, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or _dims_of(input, dim)[0] in input.dims:
        raise without_rule("argmax over a dimension that is cut")
    found = alike(torch.argmax(local_of(input), dim, keepdim=True), input)
    return found if keepdim else _squeezed(found, _dims_of(input, dim))


_LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
)


@function_rule(*_LOSSES)
def _elementwise_loss(
    func: Callable[..., Any], input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The mean or sum over the whole, on every rank."""
    reduction = kwargs.pop("reduction", "mean")
    shard = input if isinstance(input, Shard) else target
    assert isinstance(shard, Shard)
    inputs = [_matching(each, shard) for each in (input, target)]
    more = {k: _matching(v, shard) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    losses = func(*inputs, *args, reduction="none", **more)
    if reduction == "none":
        return alike(losses, shard)
    if reduction == "batchmean":
        return over_shards(losses.sum(), shard.grid) / whole_shape(shard)[0]
    summed = over_shards(losses.sum(), shard.grid)
    return summed if reduction == "sum" else summed / math.prod(whole_shape(shard))


def _matching(value: Tensor, shard: Shard) -> Tensor:
    return local_of(value) if isinstance(value, Shard) else own_part(value, shard)


@function_rule(F.cross_entropy, F.nll_loss)
def _class_loss(
    func: Callable[..., Any],
    input: Shard,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    **smoothing: float,
) -> Any:
    """Over classes in dimension 1, the mean over all voxels of the whole by their weights."""
    del size_average, reduce
    local = _matching(target, input)
    with torch._C.DisableTorchFunctionSubclass():
        losses = func(
            local_of(input), local, weight, ignore_index=ignore_index, reduction="none", **smoothing
        )
    if reduction == "none":
        return shard_of(losses, input.grid, input.dims, input.full)
    summed = over_shards(losses.sum(), input.grid)
    if reduction == "sum":
        return summed
    if local.is_floating_point():
        count = math.prod(whole_shape(input)) / input.shape[1]
        return summed / count
    seen = local != ignore_index
    weights = seen.to(losses.dtype)
    if weight is not None:
        weights = weight[local.clamp(min=0)] * weights
    return summed / add_up(weights.sum(), input.grid.group, what="counting labels")
