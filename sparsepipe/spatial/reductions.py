"""Rules for sums, means, maxima and losses of shards, whose results all ranks have.

The ranks' gradients of such a result add up to its gradient, so that the adjoint of a sum over
ranks is a sum over ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsepipe.runtime.collectives.halo import add_up, added_up
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.shard import (
    Shard,
    alike,
    as_meta,
    computed_whole,
    cut,
    function_rule,
    local_of,
    named_functions,
    own_part,
    shard_of,
    uncut,
    whole,
    whole_shape,
    widest,
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
        result = result.view_as(result)  # whose own gradient, which a step may ask for, is whole
    return result


def widened(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values are summed: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total(shard: Shard, dims: Sequence[int], how: Callable[..., Tensor]) -> Tensor:
    """Reduces the whole over ``dims``, which include all cut ones and are kept with size 1.

    ``how``: ``torch.sum`` or ``torch.mean``. Sums of values of half precision are computed in
    single precision and rounded once.
    """
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


@function_rule(torch.sum, Tensor.sum, torch.mean, Tensor.mean)
def _sum_or_mean(
    func: Callable[..., Tensor],
    input: Shard,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    axis: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    shard = input if dtype is None else alike(local_of(input).to(dtype), input)
    how, dims = getattr(torch, func.__name__), _negative(axis if dim is None else dim, input)
    cut = set(dims) & set(shard.dims)
    if not cut:
        return _without(how(local_of(shard), dims, keepdim=keepdim), shard, [] if keepdim else dims)
    if cut != set(shard.dims):
        return computed_whole(how, (shard, dims, keepdim), {}, is_cut=False)
    result = total(shard, dims, how)
    return result if keepdim else result.squeeze(tuple(dims))


def _negative(dim: int | Sequence[int] | None, shard: Shard) -> list[int]:
    """Returns dimensions, as given to a function, counted from the end; None or (): all."""
    count = local_of(shard).dim()
    given = [dim] if isinstance(dim, int) else list(dim or range(count))
    return [each - count if each >= 0 else each for each in given]


def _table(*rows: tuple[str, int, int | None]) -> dict[str, tuple[int, int | None]]:
    return {name: (place, default) for names, place, default in rows for name in names.split()}


_KEEPING = _table(
    ("softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp narrow", 0, None),
    ("glu sort argsort", 0, -1),
    ("chunk split tensor_split", 1, 0),
    ("topk diff", 1, -1),
    ("normalize", 1, 1),
)
"""Functions along one dimension: index of the argument ``dim`` after the input, and its default."""

_REDUCING = _table(
    ("var std var_mean std_mean logsumexp amin amax min max prod any all median", 0, None),
    ("nanmedian argmax argmin nansum nanmean count_nonzero aminmax select", 0, None),
    ("unbind", 0, 0),
    ("mode", 0, -1),
    ("norm vector_norm", 1, None),
    ("kthvalue", 1, -1),
    ("cosine_similarity", 1, 1),
)
"""The same of functions whose results lack that dimension, or have size 1 in it."""


@function_rule(*named_functions([*_KEEPING, *_REDUCING]))
def _along(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Computes each rank's part where no dimension that the function goes along is cut."""
    name = re.sub("^(linalg|special)_", "", func.__name__)
    place, default = (_KEEPING | _REDUCING)[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    if name in ("max", "min") and isinstance(other := kwargs.get("other", dim), Tensor):
        return getattr(torch, f"{name}imum")(input, other)
    if "softm" in name and dim is None:  # chosen as in PyTorch by the number of dimensions
        dim = 0 if input.dim() in (1, 3) else 1
    if isinstance(dim, bool):  # of var and std: whether they are unbiased
        dim = None
    dims = _negative(dim, widest((input, args, kwargs)))
    if not isinstance(input, Shard) or set(dims) & set(input.dims):
        return computed_whole(func, (input, *args), kwargs, is_cut=name in _KEEPING)
    local, count = local_of(input), input.dim()
    given, named = tree_map_only(Tensor, lambda each: own_part(each, input), (args, kwargs))
    return tree_map_only(
        Tensor,
        lambda each: _without(each, input, dims if each.dim() < count else []),
        func(local, *given, **named),
    )


_WHOLE = """
pixel_shuffle pixel_unshuffle flip fliplr flipud roll rot90 index_select gather take_along_dim
scatter scatter_add expand expand_as broadcast_to repeat tile repeat_interleave masked_select
nonzero argwhere quantile nanquantile unique unique_consecutive bincount histc equal allclose take
""".split()  # noqa: SIM905
"""Functions that are computed on every rank from the whole."""


@function_rule(*named_functions(_WHOLE))
def _whole_only(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return computed_whole(func, args, kwargs)


@function_rule(F.one_hot)
def _one_hot(func: Callable[..., Tensor], input: Shard, num_classes: int = -1) -> Tensor:
    """Returns the classes in a new last dimension, behind those that are cut."""
    found = func(whole(input), num_classes).movedim(-1, 0)
    return cut(found, input.grid, input.dims).movedim(0, -1)


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
    if kwargs.get("weight") is not None and not func.__name__.startswith("binary"):
        return computed_whole(func, args, {**kwargs, "reduction": reduction})  # a weighted mean
    shard = widest((args, kwargs))
    meta, more = as_meta((args, kwargs))
    func(*meta, reduction="none", **more)  # raises PyTorch's errors
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
    shape = list(input.shape)
    if list(target.shape) not in (shape, shape[:1] + shape[2:]):
        return func(whole(input), target, weight)  # raises PyTorch's error
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
