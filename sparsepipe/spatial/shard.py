"""A tensor that is one rank's shard of a whole, and the rules by which functions act on it.

A :class:`Shard` reports the sizes of the whole wherever PyTorch asks for its shape, so that a
module written for one device computes with the same numbers. A function that is called with a shard
uses its rule, or raises if it has none: nothing silently treats a shard as the whole.

Values that all ranks have (the result of a global pool, a loss) are plain tensors. Their gradients
are *partial*: the ranks' gradients add up to the gradient, as those of parameters do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import Grid, moved, whole_on_all

FunctionRule = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=FunctionRule)


class Shard(Tensor):
    """This rank's part of a whole tensor; made by :func:`shard_of`.

    Attributes:
        grid: grid that the whole is cut over.
        dims: cut dimensions, counted from the end (negative), one for each axis of the grid.
        full: sizes of the whole in these dimensions.
    """

    grid: Grid
    dims: tuple[int, ...]
    full: tuple[int, ...]

    rules: ClassVar[dict[Any, FunctionRule]] = {}

    def full_tensor(self) -> Tensor:
        """Gathers the whole on every rank, as a DTensor's method does; see :func:`gathered`."""
        return gathered(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in cls.rules:
            if kwargs is not None and kwargs.get("out") is not None:
                raise without_rule(f"{func.__name__} with out")
            return cls.rules[func](func, *args, **(kwargs or {}))
        owner = getattr(func, "__self__", None)  # set for attributes of tensors
        attribute = f"Tensor.{owner.__name__}" if isinstance(owner, GetSetDescriptorType) else ""
        raise without_rule(attribute or str(getattr(func, "__name__", func)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises if an operator is reached without a rule, for example from TorchScript.

        Exceptions are the view that :func:`local_of` takes, and the copy that autograd saves.
        """
        is_own = func is torch.ops.aten.alias.default and not torch._C._is_torch_function_enabled()
        if not is_own and func is not torch.ops.aten.detach.default:
            raise without_rule(str(func))
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return result if is_own else alike(result, args[0])


def named_functions(names: Sequence[str]) -> list[Any]:
    """Returns PyTorch's functions and methods of tensors that have these names."""
    places = (torch, Tensor, F, torch.special, torch.linalg)
    found = (getattr(place, name, None) for name in names for place in places)
    return [each for each in dict.fromkeys(found) if each is not None]


def function_rule(*functions: Any) -> Callable[[_Rule], _Rule]:
    """Returns a decorator that registers how ``functions`` act on shards.

    The decorated rule is called with the function and its arguments, which contain a shard.
    """

    def register(found: _Rule) -> _Rule:
        Shard.rules.update(dict.fromkeys(functions, found))
        return found

    return register


def shard_of(local: Tensor, grid: Grid, dims: Sequence[int], full: Sequence[int]) -> Shard:
    """Returns ``local`` as this rank's shard of a whole with sizes ``full`` in ``dims``."""
    with torch._C.DisableTorchFunctionSubclass():
        shard = local.as_subclass(Shard)
        shard.grid, shard.dims, shard.full = grid, tuple(dims), tuple(full)
    return shard


def local_of(value: Tensor) -> Tensor:
    """Returns the plain tensor that a shard holds: this rank's part of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        # Rules return views, so a shard straight from an autograd function is not a rule's.
        node: Any = value.grad_fn
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            made_by = type(node).__name__.removesuffix("Backward")
            if made_by not in _KNOWN_FUNCTIONS:
                raise without_rule(f"the autograd function {made_by}")
        return value.as_subclass(Tensor)


_KNOWN_FUNCTIONS = ("CheckpointFunction", "BackwardHookFunction")
"""Autograd functions of reentrant checkpointing and of module hooks, which change no values."""


def alike(local: Tensor, shard: Shard, *, full: Sequence[int] | None = None) -> Shard:
    """Returns ``local`` as a shard like ``shard``, or, if given, of a whole with sizes ``full``."""
    return shard_of(local, shard.grid, shard.dims, shard.full if full is None else full)


def whole_shape(shard: Shard) -> torch.Size:
    """Returns the shape of the whole tensor of which this is a shard."""
    shape = list(local_of(shard).shape)
    for dim, size in zip(shard.dims, shard.full, strict=True):
        shape[dim] = size
    return torch.Size(shape)


def whole(shard: Shard) -> Tensor:
    """Gathers the whole on every rank, for rules; adds up the ranks' gradients of it."""
    moves = whole_on_all(shard.grid, shard.dims, shard.full)
    return moved(local_of(shard), moves, shard.grid)


Shard.rules[Grid.gather] = lambda _, grid, local: whole(local)


def cut(whole: Tensor, grid: Grid, dims: Sequence[int] | None = None) -> Shard:
    """Returns this rank's shard of a tensor that all ranks have; inverse of :meth:`Grid.gather`.

    ``dims``: dimensions to cut (negative), one for each axis of the grid; None: the last ones.
    """
    dims = range(-grid.dimensions, 0) if dims is None else dims
    full = [whole.shape[dim] for dim in dims]
    for axis, dim in enumerate(dims):
        held = grid.held(axis, whole.shape[dim])
        whole = whole.narrow(dim, held.start, held.size)
    return shard_of(whole, grid, dims, full)


def computed_whole(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, is_cut: bool = True
) -> Any:
    """Gathers the shards among the arguments, and computes on every rank what one device would.

    For rare functions, since every rank needs the memory and the time of one device. With
    ``is_cut``, results with as many dimensions as the first shard are cut as that one is.
    """
    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Shard))
    given, named = tree_map_only(Shard, whole, (args, kwargs))
    found, count = func(*given, **named), local_of(first).dim()
    if not is_cut:
        return found
    return tree_map_only(
        Tensor,
        lambda each: cut(each, first.grid, first.dims) if each.dim() == count else each,
        found,
    )


def gathered(shard: Shard) -> Tensor:
    """Gathers the whole on every rank for code outside rules, whose loss must be equal on all."""
    moves = whole_on_all(shard.grid, shard.dims, shard.full)
    return moved(local_of(shard), moves, shard.grid, keeps_part=True)


def widest(arguments: Any) -> Shard:
    """Returns the shard in a pytree to which the others broadcast."""
    shards = [each for each in tree_leaves(arguments) if isinstance(each, Shard)]
    return max(shards, key=lambda each: (local_of(each).dim(), each.full))


def as_meta(value: Any) -> Any:
    """Replaces the tensors in a pytree by meta tensors with the shapes of the wholes.

    A function that is called with these raises PyTorch's errors about shapes on every rank alike.
    """
    return tree_map_only(
        Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"), value
    )


def own_part(value: Any, shard: Shard) -> Any:
    """Returns the part of an argument ``value`` that belongs to this rank's ``shard``.

    It is the local tensor of a shard that is cut alike, the part of another tensor that broadcasts
    to the whole, or any other value as it is.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Shard):
        cuts = [(each.grid, each.dims, each.full) for each in (value, shard)]
        if cuts[0] == cuts[1]:
            return local_of(value)
        value = whole(value)
    for axis, (dim, full) in enumerate(zip(shard.dims, shard.full, strict=True)):
        if -dim > value.dim() or (value.shape[dim] == 1 and full != 1):
            continue
        held = shard.grid.held(axis, full)
        if value.shape[dim] == full:
            value = value.narrow(dim, held.start, held.size)
        else:
            raise ConfigError(
                f"a tensor of shape {list(value.shape)} cannot be combined with a shard of a whole "
                f"of shape {list(whole_shape(shard))}",
                remedy="give the tensor the sizes of the whole in cut dimensions, or size 1",
            )
    return value


def uncut(shard: Tensor, dim: int, what: str) -> int:
    """Returns ``dim`` counted from the end; raises a ConfigError about ``what`` if it is cut."""
    place = dim if dim < 0 else dim - local_of(shard).dim()
    if isinstance(shard, Shard) and place in shard.dims:
        raise without_rule(f"{what} a dimension that is cut")
    return place


def without_rule(name: str, *, why: str = "") -> ConfigError:
    """Returns a ConfigError that says that ``name`` has no rule for shards, followed by ``why``."""
    place, frame = "", inspect.currentframe()
    while frame is not None and not place:  # the innermost module that is being called
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            place = f" (called by {type(module).__name__}.{frame.f_code.co_name})"
        frame = frame.f_back
    return ConfigError(
        f"{name} has no rule for a sample that is cut into shards{place}{why}",
        remedy="register a rule for its module with @sparsepipe.spatial.rule(Module), or gather "
        "the sample before it with Grid.gather",
    )
