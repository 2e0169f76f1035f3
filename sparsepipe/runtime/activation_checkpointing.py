"""Activation checkpointing: spans of layers keep their input only, and run again in the backward.

Uses the non-reentrant ``torch.utils.checkpoint``, so that the graph, and with it the order of every
sum, is the same as without recomputation. The second run computes what the first did and leaves no
trace: random generators start from their states at the first run (torch's by ``checkpoint`` or by
keys, numpy's, python's and those of modules here) and afterwards get back those from before the
second; norm layers get copies of their statistics, so that these are updated once; kernel maps are
rebuilt if they have been freed.
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

_second_run = ContextVar("_second_run", default=False)


def recomputing() -> bool:
    """Whether layers are running for the second time, in the backward.

    This counts layers that checkpoint themselves: what runs while autograd goes back has run
    before.
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
        self._layers = f"layers {span.start} to {span.stop - 1}"
        self._randomness = randomness
        self._modules = [inner for number in span for inner in layers[number].modules()]

    def __call__(self, value: Any, run_layers: Callable[[Any], Any]) -> Any:
        """Runs the layers so that their activations are freed.

        Raises:
            ConfigError: a layer works in place on the span's input, which is kept, or changes a
                buffer that a second run would change again, or makes a random generator.
        """
        tensors, put_together = _taken_apart(value)
        statistics = [
            (module, name, tensor.clone())
            for module in self._modules
            if isinstance(module, _NormBase) and module.training
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        drawn: dict[Any, Any] = {}
        first = [value]  # for the first run, which has the sparse tensors' caches
        del value

        def run(*kept: Tensor) -> Any:
            with derived_saved_with_tensors():
                if first:
                    with self._recording(kept, drawn):
                        return run_layers(first.pop())
                with self._as_at_first(statistics, drawn):
                    return run_layers(put_together(kept))

        keyed = self._randomness is not None  # each layer sets torch's generators itself
        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=not keyed)

    @contextmanager
    def _recording(self, kept: Sequence[Tensor], drawn: dict[Any, Any]) -> Iterator[None]:
        """Put around the first run: stores in ``drawn`` the states of generators that it draws
        from, and refuses layers of which a second run would compute something else.
        """
        versions = [tensor._version for tensor in kept]
        buffers = [
            (module, name, tensor, tensor._version)
            for module in self._modules
            if not isinstance(module, _NormBase)
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        generators = self._generators()
        states = states_of(generators)
        yield
        if any(a._version != b for a, b in zip(kept, versions, strict=True)):
            raise ConfigError(
                f"one of {self._layers} works in place on the input of the first, which is kept to "
                "recompute them",
                remedy="give that layer inplace=False, or begin the layers to be recomputed with "
                "one that leaves its input as it is",
            )
        remedy = "leave that layer out of the layers to be recomputed"
        for module, name, tensor, version in buffers:
            if tensor._version != version:
                raise ConfigError(
                    f"a {type(module).__name__} of {self._layers} changes its buffer {name!r} "
                    "whenever it runs, and would change it twice where it is recomputed",
                    remedy=remedy,
                )
        after = self._generators()
        if generators != after:
            raise ConfigError(
                f"one of {self._layers} makes or replaces a random generator when it runs, and "
                "would draw something else where it is recomputed",
                remedy=f"make generators in __init__ and keep them, or {remedy}",
            )
        drawn.update(states_before_draws(states, states_of(after)))

    @contextmanager
    def _as_at_first(
        self, statistics: Sequence[tuple[nn.Module, str, Tensor]], drawn: Mapping[Any, Any]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            if self._randomness is not None:
                stack.enter_context(self._randomness.preserved())
            for module, name, tensor in statistics:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = tensor.clone()
            stack.callback(_second_run.reset, _second_run.set(True))
            generators = self._generators() if drawn else {}
            found = [(generators[key], drawn[key]) for key in generators.keys() & drawn.keys()]
            stack.callback(set_states, swap_states(found))
            yield

    def _generators(self) -> dict[Any, Generator]:
        """Collected at each run, since modules may get other generators between epochs."""
        found: dict[Any, Generator] = {"numpy": NUMPY, "python": PYTHON}
        for place, module in enumerate(self._modules):
            found |= {(place, name): value for name, value in module_generators(module)}
        return found


def _taken_apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a span's input, each once, and a function that makes the input of them.

    The function keeps no tensor alive but coordinates.
    """
    flat, tree = pytree.tree_flatten(value, is_leaf=lambda node: isinstance(node, SparseTensor))
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    builders: list[Callable[[Sequence[Tensor]], Any]] = []
    for leaf in flat:
        tensor = leaf.feats if isinstance(leaf, SparseTensor) else leaf
        if not isinstance(tensor, Tensor):
            builders.append(partial(_constant, leaf))
            continue
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        build: Callable[[Sequence[Tensor]], Any] = itemgetter(places[id(tensor)])
        if isinstance(leaf, SparseTensor):
            make = partial(
                SparseTensor,
                stride=leaf.stride,
                spatial_shape=leaf.spatial_shape,
                batch_size=leaf.batch_size,
            )
            level = _levels.setdefault(leaf.cache, _SharedCoordinates(leaf.cache))
            build = partial(level.with_features, build, make)
        builders.append(build)

    def put_together(kept: Sequence[Tensor]) -> Any:
        return pytree.tree_unflatten([build(kept) for build in builders], tree)

    return tensors, put_together


def _constant(leaf: Any, kept: Sequence[Tensor]) -> Any:
    return leaf


class _SharedCoordinates:
    """Coordinates, and a weak reference to what is derived from them."""

    def __init__(self, cache: CoordinateCache) -> None:
        self._coords_N4 = cache.coords_N4
        self._first = weakref.ref(cache)
        self._bare = cache.bare()

    def with_features(
        self,
        features: Callable[[Sequence[Tensor]], Tensor],
        make: Callable[..., SparseTensor],
        kept: Sequence[Tensor],
    ) -> SparseTensor:
        """A sparse tensor with the cache of the first run while that exists, and then with one that
        all second runs share.
        """
        return make(features(kept), self._coords_N4, cache=self._first() or self._bare)


_levels: WeakKeyDictionary[CoordinateCache, _SharedCoordinates] = WeakKeyDictionary()
"""The coordinates that all spans share which begin at them."""
