"""Makes a module compute with one shard of each sample on every rank of a grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

import sparsepipe.spatial.pointwise
import sparsepipe.spatial.resampling  # noqa: F401
from sparsepipe.errors import ConfigError
from sparsepipe.spatial.grid import Grid
from sparsepipe.spatial.normalization import batch_norm
from sparsepipe.spatial.reductions import leave
from sparsepipe.spatial.shard import Shard, local_of, shard_of

_Module = TypeVar("_Module", bound=nn.Module)
ModuleRule = Callable[..., Any]

_RULES: dict[type[nn.Module], ModuleRule] = {}


def rule(kind: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Registers how modules of a kind, and of kinds derived from it, act on shards.

    ::

        @rule(MyModule)
        def my_module(module, grid, x):
            return ...

    The rule is called in place of the module's ``forward``, with the module, the grid and the
    arguments, among which samples are shards (:class:`sparsepipe.spatial.Shard`).
    """

    def register(found: ModuleRule) -> ModuleRule:
        _RULES[kind] = found
        return found

    return register


rule(nn.modules.batchnorm._BatchNorm)(batch_norm)

_WITHOUT = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.LocalResponseNorm,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.LPPool1d,
    nn.LPPool2d,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    nn.Unfold,
    nn.Fold,
    nn.Bilinear,
    nn.CrossMapLRN2d,
)
"""Modules of PyTorch that need more than one position and for which there is no rule."""


def spatialize(model: _Module, grid: Grid) -> _Module:
    """``model`` itself, which now takes this rank's shards and gives such, exactly as one device.

    Its parameters, buffers and state dict stay as they are. Arguments with a batch and a channel
    dimension before the grid's are shards (:meth:`Grid.shard`); others are the same on every rank.
    Outputs that keep the spatial dimensions are shards; those that do not (behind a global pool, or
    a flattened volume) are whole on every rank. After ``backward`` each rank holds its part of
    every parameter's gradient: their sum over the grid is the gradient. Where outputs are whole,
    all ranks are expected to compute the same loss of them.

    Raises:
        ConfigError: the model has a module that has no rule. Functions without one raise when they
            are called.
    """
    spatialize_layers(model, grid)
    model.forward = partial(_outermost, model.forward, grid)
    return model


def spatialize_layers(model: nn.Module, grid: Grid) -> None:
    """Lets the layers of a model compute with shards, which somebody else makes of its inputs.

    Raises:
        ConfigError: as :func:`spatialize`.
    """
    for name, module in model.named_modules():
        found = _rule_of(module)
        if found is not None:
            module.forward = partial(found, module, grid)
        elif isinstance(module, _WITHOUT):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has no rule for a sample that is "
                "cut into shards",
                remedy=f"register one, @sparsepipe.spatial.rule({type(module).__name__}), or keep "
                "it out of the spatial part of the model",
            )


def unspatialize(model: nn.Module) -> None:
    """Gives the modules of a model the forwards of their classes back."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func in (_outermost, *_RULES.values()):
            del module.__dict__["forward"]


def _rule_of(module: nn.Module) -> ModuleRule | None:
    return next((_RULES[kind] for kind in type(module).__mro__ if kind in _RULES), None)


def _outermost(forward: Callable[..., Any], grid: Grid, *args: Any, **kwargs: Any) -> Any:
    """Takes plain shards and gives such; between shards of one's own it changes nothing."""
    plain = False

    def enter(value: Any) -> Any:
        nonlocal plain
        if isinstance(value, Shard) or not isinstance(value, Tensor):
            return value
        if value.dim() < grid.dimensions + 2:
            return value
        plain = True
        return shard_of(value, grid, range(-grid.dimensions, 0), grid.whole_sizes(value))

    def give(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return local_of(value) if isinstance(value, Shard) else leave(value, grid)

    args, kwargs = tree_map(enter, args), tree_map(enter, kwargs)
    result = forward(*args, **kwargs)
    return tree_map(give, result) if plain else result
