"""Activation checkpointing: spans of layers keep their input only, and run again in the backward.

Uses the non-reentrant ``torch.utils.checkpoint``, so that the graph, and with it the order of every
sum, is the same as without recomputation. The second run computes what the first did and leaves no
trace: random generators start from their states at the first run (torch's by ``checkpoint`` or by
keys, others by :class:`_RepeatedDraws`) and afterwards get back those from before the second; norm
layers get copies of their statistics, so that these are updated once; kernel maps are rebuilt if
they have been freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.random_generators import (
    NUMPY,
    PYTHON,
    Generator,
    KeyedRandomness,
    module_generators,
    set_states,
    states_before_draws,
    states_of,
    swap_states,
)
from sparsepipe.sparse import CoordinateCache, SparseTensor
from sparsepipe.sparse.saved_tensors import derived_saved_with_tensors

RunLayers = Callable[[Any, Callable[[int], None]], Any]
"""Runs the layers of a span on a value; calls its second argument with the number of each layer
after the layer has run."""
_GeneratorName = tuple[int, int, str]
"""Layer number, index of the module among those of the span, and name of the attribute."""
_States = dict[_GeneratorName, Any]
"""States of generators before a run that drew from them."""

_second_run = ContextVar("_second_run", default=False)


def recomputing() -> bool:
    """Whether layers are running for the second time, in the backward.

    Also those that checkpoint themselves: what runs while autograd goes back has run before.
    """
    return _second_run.get() or torch._C._current_graph_task_id() != -1


class RecomputedSpan:
    """Consecutive layers of which only the input is kept for the backward.

    Args:
        randomness: seeds the draws of each layer; None: layers draw from the generators as they
            are.
    """

    def __init__(
        self, layers: nn.Sequential, span: range, *, randomness: KeyedRandomness | None
    ) -> None:
        self._layers = layers
        self._randomness = randomness
        modules = [(number, inner) for number in span for inner in layers[number].modules()]
        self._draws = _RepeatedDraws(modules)
        self._norms = [module for _, module in modules if isinstance(module, _NormBase)]
        self._others = [
            (number, module) for number, module in modules if not isinstance(module, _NormBase)
        ]

    def __call__(self, value: Any, run_layers: RunLayers) -> Any:
        """Runs the layers so that their activations are freed.

        Raises:
            ConfigError: a layer works in place on the span's input, which is kept, or changes a
                buffer that a second run would change again, or makes a random generator.
        """
        kept = _KeptInput(value)
        statistics = [
            (module, name, tensor.clone())
            for module in self._norms
            if module.training
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        drawn: _States = {}
        first = [value]  # for the first run, which has the sparse tensors' caches
        del value

        def run(*tensors: Tensor) -> Any:
            with derived_saved_with_tensors():
                if first:
                    with self._checking(tensors) as check, self._draws.recording(drawn):
                        return run_layers(first.pop(), check)
                with self._as_at_first(statistics), self._draws.repeating(drawn):
                    return run_layers(kept.put_together(tensors), lambda layer: None)

        keyed = self._randomness is not None  # each layer sets the generators itself
        return checkpoint(run, *kept.hand_over(), use_reentrant=False, preserve_rng_state=not keyed)

    @contextmanager
    def _checking(self, kept: Sequence[Tensor]) -> Iterator[Callable[[int], None]]:
        """Refuses layers that change the kept input or their buffers; yields the input's check."""
        versions = [tensor._version for tensor in kept]
        buffers = [
            (number, name, tensor, tensor._version)
            for number, module in self._others
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]

        def check(layer: int) -> None:
            if any(a._version != b for a, b in zip(kept, versions, strict=True)):
                raise ConfigError(
                    f"layer {layer} ({_kind(self._layers[layer])}) works in place on the input of "
                    "layers that are to be recomputed, which must be kept for that",
                    remedy=f"give layer {layer} inplace=False, or begin the layers to be "
                    "recomputed with one that leaves its input as it is",
                )

        yield check
        for layer, name, tensor, version in buffers:
            if tensor._version != version:
                raise ConfigError(
                    f"layer {layer} ({_kind(self._layers[layer])}) changes its buffer {name!r} "
                    "whenever it runs, and would change it twice where it is recomputed",
                    remedy=f"leave layer {layer} out of the layers to be recomputed",
                )

    @contextmanager
    def _as_at_first(self, statistics: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
        """Norm layers have their statistics of the first run within the block."""
        with ExitStack() as stack:
            if self._randomness is not None:
                stack.enter_context(self._randomness.preserved())
            for module, name, tensor in statistics:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = tensor.clone()
            stack.callback(_second_run.reset, _second_run.set(True))
            yield


class _RepeatedDraws:
    """Lets the second run of layers draw what the first run drew.

    Covers numpy's and python's global generators and those that are attributes of the modules;
    torch's global generators are left to the caller.
    """

    def __init__(self, modules: Sequence[tuple[int, nn.Module]]) -> None:
        self._modules = modules

    @contextmanager
    def recording(self, drawn: _States) -> Iterator[None]:
        """Put around the first run; stores in ``drawn`` the states of generators it draws from."""
        before = self._generators()
        states = states_of(before)
        yield
        after = self._generators()
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) is not after.get(name):
                raise self._unrepeatable(name, there=name in before, stays=name in after)
        drawn.update(states_before_draws(states, states_of(after)))

    @contextmanager
    def repeating(self, drawn: Mapping[_GeneratorName, Any]) -> Iterator[None]:
        """Put around the second run, after which generators have their states from before it."""
        if not drawn:
            yield
            return
        there = self._generators()
        replaced = swap_states(
            (there[name], state) for name, state in drawn.items() if name in there
        )
        try:
            yield
        finally:
            set_states(replaced)

    def _generators(self) -> dict[_GeneratorName, Generator]:
        """Collected at each run, since modules may get other generators between epochs."""
        found: dict[_GeneratorName, Generator] = {
            (-1, 0, "numpy"): NUMPY,
            (-1, 0, "python"): PYTHON,
        }
        for place, (number, module) in enumerate(self._modules):
            for name, value in module_generators(module):
                found[number, place, name] = value
        return found

    def _unrepeatable(self, generator: _GeneratorName, *, there: bool, stays: bool) -> ConfigError:
        layer, place, name = generator
        does = "makes" if not there else "replaces" if stays else "drops"
        return ConfigError(
            f"layer {layer} {does} a random generator, {name!r} of its "
            f"{_kind(self._modules[place][1])}, when it runs, and would draw something else where "
            "it is recomputed",
            remedy="make its generators before training, in __init__ for example, and keep them; "
            "or leave that layer out of the layers to be recomputed",
        )


class _KeptInput:
    """The input of a span: a tree whose tensors autograd keeps."""

    def __init__(self, value: Any) -> None:
        flat, self._tree = pytree.tree_flatten(
            value, is_leaf=lambda node: isinstance(node, SparseTensor)
        )
        self._tensors: dict[int, Tensor] = {}
        self._builders = [self._builder(leaf) for leaf in flat]

    def hand_over(self) -> list[Tensor]:
        """The tensors, each once; references to them here are dropped."""
        tensors = list(self._tensors.values())
        self._tensors.clear()
        return tensors

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuilds the input from the tensors that autograd has kept."""
        return pytree.tree_unflatten([build(tensors) for build in self._builders], self._tree)

    def _builder(self, leaf: Any) -> Callable[[Sequence[Tensor]], Any]:
        if isinstance(leaf, Tensor):
            return itemgetter(self._place(leaf))
        if not isinstance(leaf, SparseTensor):
            return lambda tensors: leaf
        place, level = self._place(leaf.feats), _level_of(leaf.cache)
        build = partial(
            SparseTensor,
            stride=leaf.stride,
            spatial_shape=leaf.spatial_shape,
            batch_size=leaf.batch_size,
        )
        return lambda tensors: build(tensors[place], level.coords_N4, cache=level.cache())

    def _place(self, tensor: Tensor) -> int:
        self._tensors.setdefault(id(tensor), tensor)
        return list(self._tensors).index(id(tensor))


class _Level:
    """Coordinates, and a weak reference to what is derived from them."""

    def __init__(self, cache: CoordinateCache) -> None:
        self.coords_N4 = cache.coords_N4
        self._first = weakref.ref(cache)
        self._bare = cache.bare()

    def cache(self) -> CoordinateCache:
        """The cache of the first run while it exists; then one shared by the second runs."""
        return self._first() or self._bare


_levels: WeakKeyDictionary[CoordinateCache, _Level] = WeakKeyDictionary()


def _level_of(cache: CoordinateCache) -> _Level:
    """The level shared by all spans that begin at the same coordinates."""
    return _levels.setdefault(cache, _Level(cache))


def _kind(layer: nn.Module) -> str:
    return type(layer).__name__
