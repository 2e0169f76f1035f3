"""A tensor that is one rank's shard of a whole, and the rules by which functions act on it.

A :class:`Shard` says the sizes of the whole wherever PyTorch asks for its shape, so that a module
written for one device computes with the same numbers. Every function that is called with one finds
its rule here, or raises: nothing acts on shards in silence as if they were whole.

Values that all ranks have (the result of a global pool, a loss) are plain tensors. Their gradients
are *partial*: the gradient of the whole is the sum over the ranks, as it is for parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import Grid, moved, whole_on_all

FunctionRule = Callable[..., Any]


class Shard(Tensor):
    """This rank's part of a whole; made by :func:`shard_of`.

    Attributes:
        grid: that the whole is cut over.
        dims: of the tensor, counted from its end, one for each axis of the grid.
        full: sizes of the whole in these.
    """

    grid: Grid
    dims: tuple[int, ...]
    full: tuple[int, ...]

    rules: ClassVar[dict[Any, FunctionRule]] = {}

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = cls.rules.get(func)
        if rule is None:
            raise without_rule(getattr(func, "__qualname__", None) or str(func))
        return rule(func, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self


def function_rule(*functions: Any) -> Callable[[FunctionRule], FunctionRule]:
    """Registers how ``functions`` act on shards.

    A rule is called with the function and its arguments, of which at least one holds a shard.
    """

    def register(found: FunctionRule) -> FunctionRule:
        for function in functions:
            Shard.rules[function] = found
        return found

    return register


def shard_of(local: Tensor, grid: Grid, dims: Sequence[int], full: Sequence[int]) -> Shard:
    """``local`` as this rank's shard of a whole that has ``full`` sizes in dimensions ``dims``."""
    with torch._C.DisableTorchFunctionSubclass():
        shard = local.as_subclass(Shard)
        shard.grid, shard.dims, shard.full = grid, tuple(dims), tuple(full)
    return shard


def local_of(value: Tensor) -> Tensor:
    """The plain tensor that a shard holds."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def alike(local: Tensor, shard: Shard, *, full: Sequence[int] | None = None) -> Shard:
    """``local`` as a shard in the place of ``shard``, of other sizes of the whole if given."""
    return shard_of(local, shard.grid, shard.dims, shard.full if full is None else full)


def whole_shape(shard: Shard) -> torch.Size:
    """The shape of the whole."""
    shape = list(local_of(shard).shape)
    for dim, size in zip(shard.dims, shard.full, strict=True):
        shape[dim] = size
    return torch.Size(shape)


def whole(shard: Shard) -> Tensor:
    """The whole on every rank, for layers that need all of it at once; gradients are partial."""
    moves = whole_on_all(shard.grid, shard.dims, shard.full)
    return moved(local_of(shard), moves, shard.grid)


def own_part(value: Tensor, shard: Shard) -> Tensor:
    """What goes with ``shard`` of a plain tensor that is broadcast to it.

    That is all of it where it has no or one position in a dimension of the whole; this rank's where
    it has those of the whole.

    Raises:
        ConfigError: its sizes are neither the whole's nor the shard's.
    """
    sizes = local_of(shard).shape
    for axis, (dim, full) in enumerate(zip(shard.dims, shard.full, strict=True)):
        if -dim > value.dim() or value.shape[dim] == 1:
            continue
        held = shard.grid.held(axis, full)
        if value.shape[dim] == full:
            value = value.narrow(dim, held.start, held.size)
        elif value.shape[dim] != sizes[dim]:
            raise ConfigError(
                f"a tensor of shape {list(value.shape)} meets a shard of shape "
                f"{list(whole_shape(shard))}",
                remedy="give it the sizes of the whole, or those of the shard (Grid.shard)",
            )
    return value


def without_rule(name: str, *, why: str = "") -> ConfigError:
    """The error for a function or module that has no rule for shards."""
    return ConfigError(
        f"{name} has no rule for a sample that is cut into shards{_place()}{why}",
        remedy="register one for its module, @sparsepipe.spatial.rule(Module), or gather the "
        "sample before it (Grid.gather)",
    )


def _place() -> str:
    """The innermost module that is being called, for an error."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return f" (called by {type(module).__name__}.{frame.f_code.co_name})"
        frame = frame.f_back
    return ""
