"""Makes a module compute with one shard of each sample on every rank of a grid."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import sparsepipe.spatial.pointwise
import sparsepipe.spatial.resampling  # noqa: F401
from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.normalization import batch_norm
from sparsepipe.spatial.reductions import enter, leave
from sparsepipe.spatial.shard import Shard, cut, gathered, local_of, shard_of

_Module = TypeVar("_Module", bound=nn.Module)
ModuleRule = Callable[..., Any]

_RULES: dict[type[nn.Module], ModuleRule] = {}
inside_layers = ContextVar("inside_layers", default=False)
"""Whether layers run on shards between tensors that all ranks have (:func:`through_shards`)."""


def rule(kind: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Registers a rule for modules of class ``kind``, and of subclasses with the same forward.

    ::

        @rule(MyModule)
        def my_module(module, grid, x):
            whole = grid.gather(x)
            return cut(type(module).forward(module, whole), grid)

    The rule is called in place of the module's ``forward``, with the module, the grid and the
    arguments. Samples in arguments and results are shards (:class:`sparsepipe.spatial.Shard`); a
    plain tensor that the rule returns must be the same on every rank.
    """

    def register(found: ModuleRule) -> ModuleRule:
        _RULES[kind] = found
        return found

    return register


for _norm in (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm):
    rule(_norm)(batch_norm)

_WITHOUT = (
    *(nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Transformer),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.LocalResponseNorm),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.LPPool1d, nn.LPPool2d),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d),
    *(nn.MaxUnpool3d, nn.Unfold, nn.Fold, nn.Bilinear, nn.CrossMapLRN2d),
)
"""PyTorch modules that cannot compute position by position, but have no rule."""


@dataclass(eq=False, slots=True)
class _SpatialForward:
    """Replacement of a module's ``forward``; the module's copies keep it, pickles do not."""

    module: nn.Module
    grid: Grid
    by_rule: ModuleRule | None  # called in place of the module's forward
    is_outermost: bool  # inputs and outputs are plain tensors that hold this rank's shards
    before: Callable[..., Any] | None  # attribute ``forward`` that the instance had

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = False
        leaves, form = tree_flatten((args, kwargs))
        if self.is_outermost:  # inputs that are shards already stay as they are
            dims = range(-self.grid.dimensions, 0)
            for place, value in enumerate(leaves):
                is_sample = isinstance(value, Tensor) and not isinstance(value, Shard)
                if is_sample and value.dim() >= self.grid.dimensions + 2:
                    plain, sizes = True, self.grid.whole_sizes(value)
                    leaves[place] = shard_of(value, self.grid, dims, sizes)
            args, kwargs = tree_unflatten(leaves, form)
        if self.by_rule is not None and any(isinstance(each, Shard) for each in leaves):
            result = self.by_rule(self.module, self.grid, *args, **kwargs)
        else:  # after a global pool, no argument is a shard
            result = _own_forward(self.module, self.before)(*args, **kwargs)
        if not plain:
            return result
        return tree_map_only(
            Tensor,
            lambda each: local_of(each) if isinstance(each, Shard) else leave(each, self.grid),
            result,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _SpatialForward:
        module, before = copy.deepcopy((self.module, self.before), memo)
        return _SpatialForward(module, self.grid, self.by_rule, self.is_outermost, before)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self.module, self.before)


def _own_forward(module: nn.Module, before: Callable[..., Any] | None) -> Callable[..., Any]:
    return MethodType(type(module).forward, module) if before is None else before


def spatialize(model: _Module, grid: Grid) -> _Module:
    """Makes ``model`` compute with this rank's shards what one device would; returns ``model``.

    Parameters, buffers and state dict stay as they are. Arguments that have a batch and a channel
    dimension besides the grid's must be shards (:meth:`Grid.shard`), others the same on every rank.
    Outputs with the spatial dimensions are shards; others (after a global pool or a flatten)
    are whole on every rank, and all ranks must compute the same loss from them. After ``backward``,
    the ranks' gradients of a parameter add up to its gradient. :func:`unspatialize` undoes this.

    Raises:
        ConfigError: a module of the model has no rule, or is compiled. Functions without a rule
            raise when they are called.
    """
    spatialize_layers(model, grid)
    forward = vars(model).get("forward")
    if isinstance(forward, _SpatialForward):
        forward.is_outermost = True
    else:
        model.forward = _SpatialForward(model, grid, None, True, forward)
    return model


def spatialize_layers(model: nn.Module, grid: Grid) -> None:
    """Makes the modules of a model compute with inputs that are already of class Shard."""
    check_rules(model)
    unspatialize(model)
    for module in model.modules():
        if (found := _rule_of(module)) is not None:
            before = vars(module).get("forward")
            module.forward = _SpatialForward(module, grid, found, False, before)


def check_rules(model: nn.Module) -> None:
    """Raises a ConfigError if a module has no rule or is compiled."""
    ruled = [name for name, module in model.named_modules() if _rule_of(module) is not None]
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in ruled)
        if isinstance(module, _WITHOUT) and name not in ruled and not inside:
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has no rule for a sample that is "
                "cut into shards",
                remedy=f"register one with @sparsepipe.spatial.rule({type(module).__name__}), or "
                "keep the module out of the spatial part of the model",
            )
        compiled = vars(module).get("_compiled_call_impl") is not None
        compiled = compiled or type(module).__name__ == "OptimizedModule"
        if compiled or isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) is compiled, so rules for shards "
                "cannot apply to what it computes",
                remedy="spatialize the module that it was compiled from",
            )


def unspatialize(model: _Module) -> _Module:
    """Undoes :func:`spatialize`; returns ``model``, which takes and returns whole samples again."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _SpatialForward):
            del module.forward
            if forward.before is not None:
                module.forward = forward.before
    return model


def _rule_of(module: nn.Module) -> ModuleRule | None:
    """Returns a module's rule; None without one, or if a subclass overrides ``forward``."""
    kind = next((kind for kind in type(module).__mro__ if kind in _RULES), None)
    same = kind is not None and type(module).forward is kind.forward
    return _RULES[kind] if kind is not None and same else None


def sample_sizes(batch: Any, grid: Grid) -> torch.Size:
    """Returns the spatial sizes of the first tensor with two dimensions or more before the grid's.

    If a batch has no such tensor, it raises a ConfigError.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() >= grid.dimensions + 2:
            return leaf.shape[-grid.dimensions :]
    raise ConfigError(
        f"a batch has no tensor with {grid.dimensions} dimensions after batch and channel, which a "
        f"grid of {' x '.join(map(str, grid.shape))} needs",
        remedy="give the grid one entry for each spatial dimension of the samples; in a pipeline, "
        "give grids only to stages whose input has these dimensions",
    )


def has_sizes(value: Any, sizes: torch.Size) -> bool:
    """Returns whether a value is a plain tensor (no shard) whose last dimensions have ``sizes``."""
    spatial = type(value) in (Tensor, nn.Parameter) and value.dim() > len(sizes)
    return spatial and value.shape[-len(sizes) :] == sizes


def through_shards(grid: Grid, layers: Callable[[Any], Any], whole: Any) -> Any:
    """Cuts the pytree ``whole``, which all ranks have, into shards; calls ``layers`` with these.

    ``layers`` are those of :func:`spatialize_layers`. Tensors with the spatial sizes of the samples
    (:func:`sample_sizes`) are cut. Results, and gradients of inputs and results, are whole on every
    rank; the ranks' gradients of a parameter add up to its gradient.
    """
    sizes = sample_sizes(whole, grid)
    grid.check(sizes)

    def entered(leaf: Tensor) -> Tensor:
        value = enter(leaf, grid)  # a copy of the shard lets the whole be freed
        return cut(value, grid).clone() if has_sizes(leaf, sizes) else value

    token = inside_layers.set(True)
    try:
        found = layers(tree_map_only(Tensor, entered, whole))
    finally:
        inside_layers.reset(token)
    return tree_map_only(
        Tensor,
        lambda leaf: gathered(leaf) if isinstance(leaf, Shard) else leave(leaf, grid),
        found,
    )
