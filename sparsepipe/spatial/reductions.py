"""Rules for sums, means, maxima and losses of shards, whose results all ranks have.

The ranks' gradients of such a result add up to its gradient, so that the adjoint of a sum over
ranks is a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepipe.runtime.collectives.halo import add_up, added_up
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    cut,
    function_rule,
    local_of,
    own_part,
    shard_of,
    uncut,
    whole,
    whole_shape,
    without_rule,
)


def enter(value: Tensor, grid: Grid) -> Tensor:
    """Returns ``value``, equal on all ranks, for layers on shards; gradients add up over ranks."""
    result = value.view_as(value)
    if result.requires_grad:
        what = "adding up gradients over shards"
        result.register_hook(lambda gradient: add_up(gradient, grid.group, what=what))  # type: ignore[no-untyped-call]
    return result


def leave(value: Tensor, grid: Grid) -> Tensor:
    """Returns ``value``, equal on all ranks, which layers on shards pass to code outside rules.

    The inverse of :func:`enter`: since all ranks then compute the same loss, the backward pass
    divides each rank's gradient by the number of ranks before layers get it.
    """
    result = value.view_as(value)
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient / grid.size)  # type: ignore[no-untyped-call]
    return result


def widened(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values are summed: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total(shard: Shard, dims: Sequence[int], how: Callable[..., Tensor]) -> Tensor:
    """Reduces the whole over ``dims``, which include all cut ones and are kept with size 1.

    ``how``: ``torch.sum``, ``torch.mean`` or ``torch.amax``, which gathers the whole. Sums of
    values of half precision are computed in single precision and rounded once.
    """
    if how is torch.amax:
        return how(whole(shard), dims, keepdim=True)
    local = local_of(shard)
    dtype = how(local.new_zeros(1)).dtype  # PyTorch's choice, under autocast as well
    summed = local.sum(list(dims), keepdim=True, dtype=widened(dtype))
    summed = added_up(summed, shard.grid.group, what="values of shards")
    if how is torch.mean:
        summed = summed / math.prod(whole_shape(shard)[dim] for dim in dims)
    return summed.to(dtype)


def _sum_of(losses: Tensor, grid: Grid) -> Tensor:
    """Adds up the elements of ``losses`` over all ranks, in single precision at least."""
    summed = losses.sum(dtype=widened(losses.dtype))
    return added_up(summed, grid.group, what="values of shards").to(losses.dtype)


def _without(local: Tensor, shard: Shard, gone: Sequence[int]) -> Shard:
    """Returns ``local`` as a shard like ``shard``, but without the uncut dimensions ``gone``."""
    dims = [dim + sum(each > dim for each in gone) for dim in shard.dims]
    return shard_of(local, shard.grid, dims, shard.full)


@function_rule(torch.sum, Tensor.sum, torch.mean, Tensor.mean, torch.amax, Tensor.amax)
def _sum_mean_or_amax(
    func: Callable[..., Tensor],
    input: Shard,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    shard = input if dtype is None else alike(local_of(input).to(dtype), input)
    how, count = getattr(torch, func.__name__), local_of(shard).dim()
    given = [dim] if isinstance(dim, int) else list(dim or range(count))
    dims = [each - count if each >= 0 else each for each in given]
    cut = set(dims) & set(shard.dims)
    if cut and cut != set(shard.dims):
        raise without_rule("a reduction over some of the dimensions that are cut")
    if not cut:
        return _without(how(local_of(shard), dims, keepdim=keepdim), shard, [] if keepdim else dims)
    result = total(shard, dims, how)
    return result if keepdim else result.squeeze(tuple(dims))


@function_rule(torch.max, Tensor.max)
def _max(
    _: Any, input: Shard, dim: int | Tensor | None = None, keepdim: bool = False, **other: Tensor
) -> Any:
    if dim is None and not other:
        return _sum_mean_or_amax(torch.amax, input)
    if not isinstance(dim, int):
        return torch.maximum(input, other.get("other", dim))  # type: ignore[arg-type]
    place = uncut(input, dim, "max with indices over")
    gone = [] if keepdim else [place]
    values, indices = torch.max(local_of(input), dim, keepdim)
    return torch.return_types.max((_without(values, input, gone), _without(indices, input, gone)))


@function_rule(torch.argmax, Tensor.argmax)
def _argmax(_: Any, input: Shard, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        raise without_rule("argmax over all dimensions")
    place = uncut(input, dim, "argmax over")
    return _without(torch.argmax(local_of(input), dim, keepdim), input, [] if keepdim else [place])


@function_rule(
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.poisson_nll_loss),
)
def _elementwise_loss(
    func: Callable[..., Any], *args: Any, reduction: str = "mean", **kwargs: Any
) -> Any:
    """Computes a loss's mean or sum over the whole, or a shard for ``reduction="none"``."""
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        raise without_rule("a loss with size_average or reduce", why=": give it a reduction")
    shards = [each for each in [*args, *kwargs.values()] if isinstance(each, Shard)]
    shard = max(shards, key=lambda each: local_of(each).dim())
    values = [own_part(value, shard) for value in args]
    named = {name: own_part(value, shard) for name, value in kwargs.items()}
    losses = func(*values, reduction="none", **named)
    whole_losses = alike(losses, shard)
    if reduction == "none":
        return whole_losses
    summed, shape = _sum_of(losses, shard.grid), whole_shape(whole_losses)
    if reduction == "batchmean":
        return summed / shape[0]
    return summed if reduction == "sum" else summed / math.prod(shape)


@function_rule(F.cross_entropy, F.nll_loss)
def _class_loss(
    func: Callable[..., Any],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **smoothing: float,
) -> Any:
    """Computes a loss over the classes in dimension 1, reduced over all positions of the whole."""
    if size_average is not None or reduce is not None:
        raise without_rule("a loss with size_average or reduce", why=": give it a reduction")
    if not isinstance(input, Shard):  # after a layer that gathers the whole; labels are cut
        assert isinstance(target, Shard)
        input = cut(input, target.grid)
    uncut(input, 1, "a loss over classes in")
    local = own_part(target, input)
    losses = func(
        local_of(input), local, weight, ignore_index=ignore_index, reduction="none", **smoothing
    )
    if reduction == "none":
        return shard_of(losses, input.grid, input.dims, input.full)
    summed = _sum_of(losses, input.grid)
    if reduction == "sum":
        return summed
    if local.is_floating_point():
        count = math.prod(whole_shape(input)) / input.shape[1]
        return summed / count
    seen = local != ignore_index
    weights = seen.to(losses.dtype)
    if weight is not None:
        weights = weight[torch.where(seen, local, 0)] * weights
    return summed / add_up(weights.sum(), input.grid.group, what="counting labels")
