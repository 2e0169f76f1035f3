"""Rules for functions that act on each position alone or change a tensor's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsepipe.spatial.normalization import recomputing
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
    whole,
    whole_shape,
    widest,
    without_rule,
)

_ONE = """
relu relu_ leaky_relu leaky_relu_ elu elu_ selu selu_ celu celu_ gelu silu mish hardswish
hardsigmoid hardtanh hardtanh_ relu6 softplus softsign tanhshrink hardshrink softshrink logsigmoid
threshold sigmoid tanh exp expm1 log log1p log2 log10 sqrt rsqrt abs neg square reciprocal sin cos
erf sign floor ceil round trunc frac clamp clamp_min clamp_max clip nan_to_num isnan isinf
isfinite clone detach contiguous float double half bfloat16 int long bool cpu cuda
zeros_like ones_like full_like positive logical_not bitwise_not lgamma add sub subtract mul
multiply div divide true_divide floor_divide pow remainder fmod maximum minimum eq ne lt le gt ge
where lerp addcmul addcdiv atan2 logical_and logical_or logical_xor masked_fill rsub float_power
hypot prelu threshold_ xlogy add_ sub_ mul_ div_ clamp_ sigmoid_ tanh_ exp_ zero_ fill_
masked_fill_ addcmul_ neg_ copy_ pow_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__
__rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __floordiv__ __pow__ __rpow__ __neg__
__pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__
__rand__ __ror__ __mod__
""".split()  # noqa: SIM905
"""Functions whose result at a position depends only on the arguments at that position."""

_SAME = """
dim is_floating_point is_complex element_size __hash__ is_contiguous get_device register_hook
retain_grad requires_grad_
""".split()  # noqa: SIM905
"""Functions that run on a shard as on any tensor."""

_PROPERTIES = """
dtype device requires_grad grad_fn is_leaf layout is_cuda is_cpu is_sparse ndim names is_quantized
is_meta is_mkldnn is_mps is_xpu retains_grad
""".split()  # noqa: SIM905


@function_rule(*named_functions(_ONE))
def _each_position(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    name = str(getattr(func, "__name__", func))
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place and not isinstance(args[0], Shard):
        raise without_rule(f"{name}, which would write a shard into a plain tensor,")
    in_place |= name.startswith("__i") and name != "__invert__" and isinstance(args[0], Shard)
    first = args[0] if in_place else widest((args, kwargs))
    cut = Shard if func in (F.prelu, torch.prelu) else Tensor  # prelu's weight is per channel
    parts, named = tree_map_only(cut, lambda each: own_part(each, first), (args, kwargs))
    result = func(*parts, **named)
    if isinstance(result, Tensor):
        return alike(result, first)
    if result is NotImplemented:
        return result
    raise without_rule(f"{name} with these arguments")  # such as where(x)


@function_rule(Tensor.to, Tensor.type, Tensor.type_as)
def _converted(func: Callable[..., Any], value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Converts dtype or device; ``value``, and the tensor whose type it takes, may be shards."""
    given = [local_of(each) if isinstance(each, Shard) else each for each in args]
    if not isinstance(value, Shard):
        return func(value, *given, **kwargs)
    found = func(local_of(value), *given, **kwargs)
    return alike(found, value) if isinstance(found, Tensor) else found


@function_rule(
    *named_functions(_SAME),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.autograd.backward,
    torch.autograd.grad,
    Tensor.backward,
)
def _itself(func: Callable[..., Any], shard: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(shard, *args, **kwargs)


_RULES_OF_ONE_LINE: tuple[tuple[list[Any], Callable[..., Any]], ...] = (
    (  # answered for the whole
        [
            Tensor.shape.__get__,  # type: ignore[attr-defined]
            *(Tensor.size, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__),
        ],
        lambda func, shard, *args, **kwargs: func(
            torch.empty(whole_shape(shard), device="meta"), *args, **kwargs
        ),
    ),
    (
        [Tensor.__repr__, Tensor.__str__],
        lambda _, shard, **__: (
            f"Shard({list(local_of(shard).shape)} of {list(whole_shape(shard))})"
        ),
    ),
    (
        named_functions(["new_empty", "new_zeros", "new_ones", "new_tensor", "new_full"]),
        lambda func, shard, *args, **kwargs: func(local_of(shard), *args, **kwargs),
    ),
)
for _functions, _rule in _RULES_OF_ONE_LINE:
    Shard.rules.update(dict.fromkeys(_functions, _rule))


@function_rule(Tensor.grad.__get__)  # type: ignore[union-attr]
def _grad(_: Any, shard: Shard) -> Tensor | None:
    grad: Tensor | None = _itself(_, shard)
    if grad is None or isinstance(grad, Shard) or recomputing():
        return grad  # reentrant checkpointing passes it to autograd, as a plain tensor
    return alike(grad, shard)


@function_rule(torch.cat, torch.concat, torch.concatenate)
def _cat(_: Any, tensors: Sequence[Tensor], dim: int = 0, **more: Any) -> Any:
    first = next(each for each in tensors if isinstance(each, Shard))
    dim = more.get("axis", dim)
    torch.cat(as_meta(tensors), dim)  # raises PyTorch's errors
    if (dim if dim < 0 else dim - local_of(first).dim()) in first.dims:
        return computed_whole(torch.cat, (tensors, dim), {})
    return alike(torch.cat([own_part(each, first) for each in tensors], dim), first)


@function_rule(
    *(torch.permute, Tensor.permute, torch.movedim, Tensor.movedim),
    *(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes),
)
def _permuted(func: Callable[..., Tensor], input: Shard, *args: Any, **kwargs: Any) -> Shard:
    """Reorders the dimensions of a shard. The new order is read off a meta tensor whose i-th size
    is i, to which the same function is applied.
    """
    ndim = local_of(input).dim()
    order = list(func(torch.empty(tuple(range(ndim)), device="meta"), *args, **kwargs).shape)
    dims = [order.index(each + ndim) - ndim for each in input.dims]
    return shard_of(local_of(input).permute(order), input.grid, dims, input.full)


@function_rule(
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.view_as, Tensor.reshape_as),
    *(torch.flatten, Tensor.flatten, torch.unflatten, Tensor.unflatten),
    *(torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze),
)
def _reshaped(func: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns a shard if the last dimensions, from the first cut one on, stay; else the whole."""
    like, given, named = as_meta((input, args, kwargs))
    found = func(like, *given, **named)
    shape = list(found.shape)
    if not isinstance(input, Shard):  # viewed as a shard
        return input.reshape(shape)
    if found.dtype != like.dtype:
        raise without_rule("a view of another dtype")
    local, count = local_of(input), -min(input.dims)
    if len(shape) >= count and shape[-count:] == list(like.shape)[-count:]:
        return alike(local.reshape([*shape[:-count], *local.shape[-count:]]), input)
    return whole(input).reshape(shape)


@function_rule(Tensor.__getitem__)
def _getitem(_: Any, input: Tensor, index: Any) -> Any:
    """Indexes the shard where cut dimensions stay as they are or are cropped, else the whole."""
    given = list(index) if isinstance(index, tuple) else [index]
    simple = (int, slice, type(None), type(...))
    if not isinstance(input, Shard) or any(type(each) not in simple for each in given):
        return computed_whole(Tensor.__getitem__, (input, index), {})
    as_meta(input)[index]  # raises PyTorch's errors
    sizes, left = input.shape, len(input.shape)
    place = given.index(Ellipsis) if Ellipsis in given else len(given)
    named = sum(each is not None and each is not Ellipsis for each in given)
    given[place : place + 1] = [slice(None)] * (left - named)
    is_whole, pads, dims = False, [0, 0] * left, dict[int, int]()
    for number, each in enumerate(given):
        if each is None:
            continue
        dim, left = -left, left - 1
        if dim not in input.dims:
            continue
        if not isinstance(each, slice):
            is_whole = True
            continue
        start, stop, step = each.indices(sizes[dim])
        is_whole |= step != 1 or stop <= start
        pads[-2 * dim - 2], pads[-2 * dim - 1] = -start, stop - sizes[dim]
        given[number] = slice(None)
        dims[dim] = -sum(not isinstance(other, int) for other in given[number:])
    new = [dims[dim] for dim in input.dims if dim in dims]
    if is_whole:
        found = whole(input)[index]
        return cut(found, input.grid, new) if len(new) == len(input.dims) else found
    if any(pads):
        input = F.pad(input, pads)
        assert isinstance(input, Shard)
    return shard_of(local_of(input)[tuple(given)], input.grid, new, input.full)


@function_rule(Tensor.__setitem__)
def _setitem(_: Any, input: Tensor, index: Any, value: Any) -> None:
    changed = whole(input).clone() if isinstance(input, Shard) else input
    index, value = tree_map_only(Shard, whole, (index, value))
    changed[index] = value
    if isinstance(input, Shard):
        local_of(input).copy_(own_part(changed, input))


@function_rule(F.linear, F.layer_norm)
def _over_last(func: Callable[..., Any], input: Shard, over: Any, *args: Any, **kwargs: Any) -> Any:
    """Applies ``linear`` (``over``: weight) or ``layer_norm`` (the shape) over uncut dimensions."""
    count = 1 if func is F.linear else len(over)
    if any(-dim <= count for dim in input.dims):
        return computed_whole(func, (input, over, *args), kwargs)
    return alike(func(local_of(input), over, *args, **kwargs), input)


_CHANNEL_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)


@function_rule(F.dropout, torch.dropout, *_CHANNEL_DROPOUTS)
def _dropout(
    func: Callable[..., Any], input: Shard, p: float = 0.5, training: bool = True,
    inplace: bool = False,
) -> Shard:  # fmt: skip
    """Draws the mask of the whole, the same on every rank, and applies this rank's part of it."""
    if not training or p == 0:
        return input
    local, like, draw = local_of(input), _whole_like(input), torch.dropout
    if func in _CHANNEL_DROPOUTS:
        # The mask of one position, drawn as one device does: other functions draw other numbers.
        draw = torch.feature_dropout
        for dim in range(2, like.dim()):
            like = like.narrow(dim, 0, 1)
    mask = own_part(draw(like.fill_(1), p, True), input).clone()
    return alike(local.mul_(mask) if inplace else local * mask, input)


def _whole_like(shard: Shard) -> Tensor:
    """Returns a plain tensor with the shape of the whole, in whose order of memory one device draws
    numbers for the whole.
    """
    shape, local = whole_shape(shard), local_of(shard)
    order = sorted(range(len(shape)), key=lambda dim: -local.stride()[dim])
    places = [order.index(dim) for dim in range(len(shape))]
    return local.new_empty([shape[dim] for dim in order]).permute(places)


@function_rule(torch.rand_like, torch.randn_like)
def _drawn_like(func: Callable[..., Any], input: Shard, **kwargs: Any) -> Shard:
    return alike(own_part(func(_whole_like(input), **kwargs), input).clone(), input)
