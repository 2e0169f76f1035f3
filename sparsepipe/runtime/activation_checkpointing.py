"""Activation checkpointing: layers keep only their input and run again during the backward pass.

Uses the non-reentrant ``torch.utils.checkpoint``, so that the graph, and with it the order of every
sum, is the same as without recomputation. The second run computes the same as the first, and leaves
random generators and the statistics of norm layers as it found them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
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
    is_generator,
    set_states,
    states_before_draws,
    states_of,
    swap_states,
)
from sparsepipe.sparse import CoordinateCache, SparseTensor
from sparsepipe.sparse.saved_tensors import derived_saved_with_tensors

_second_run = ContextVar("_second_run", default=False)


def recomputing() -> bool:
    """Whether code runs during a backward pass, in which layers run again."""
    return _second_run.get() or torch._C._current_graph_task_id() != -1


class RecomputedSpan:
    """Layers with the indices ``span``, which keep only their input for the backward pass.

    ``randomness``: how the code that runs the layers seeds torch's generators; None: it does not.
    """

    def __init__(
        self, layers: nn.Sequential, span: range, *, randomness: KeyedRandomness | None
    ) -> None:
        self._layers = f"one of layers {span.start} to {span.stop - 1}"
        if len(span) == 1:
            self._layers = f"layer {span.start}"
        self._randomness = randomness
        self._modules = [inner for number in span for inner in layers[number].modules()]

    def __call__(self, value: Any, run_layers: Callable[[Any], Any]) -> Any:
        """Returns ``run_layers(value)``, whose activations are recomputed in the backward pass.

        Raises a ConfigError if a layer would compute something different in its second run.
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
        first = [value]  # for the first run, which uses the caches of sparse tensors
        del value

        def run(*kept: Tensor) -> Any:
            with derived_saved_with_tensors(), ExitStack() as stack:
                if first:
                    stack.enter_context(self._recording(kept, drawn))
                    return run_layers(first.pop())
                # The state of the first run is restored here, and the present one at the end.
                if self._randomness is not None:
                    stack.enter_context(self._randomness.preserved())
                for module, name, tensor in statistics:
                    stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                    module._buffers[name] = tensor.clone()
                stack.callback(_second_run.reset, _second_run.set(True))
                generators = self._generators() if drawn else {}
                found = [(generators[key], drawn[key]) for key in generators.keys() & drawn.keys()]
                stack.callback(set_states, swap_states(found))
                return run_layers(put_together(kept))

        keyed = self._randomness is not None  # then torch's generators are seeded for each layer
        return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=not keyed)

    @contextmanager
    def _recording(self, kept: Sequence[Tensor], drawn: dict[Any, Any]) -> Iterator[None]:
        """Context of the first run; stores in ``drawn`` the old states of generators that drew."""
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
        remedy = "leave that layer out of the recomputed layers"
        changed = [(type(m).__name__, name) for m, name, t, v in buffers if t._version != v]
        refused, after = "", self._generators()
        if any(a._version != b for a, b in zip(kept, versions, strict=True)):
            refused = "changes in place the input from which they are recomputed"
            remedy = f"give that layer inplace=False, or {remedy}"
        elif changed:
            refused = f"({changed[0][0]}) would change its buffer {changed[0][1]!r} again if rerun"
        elif generators != after:
            refused = "creates or replaces a random generator, so its draws would differ if rerun"
            remedy = f"create generators in __init__ and keep them, or {remedy}"
        if refused:
            raise ConfigError(f"{self._layers} {refused}", remedy=remedy)
        drawn.update(states_before_draws(states, states_of(after)))

    def _generators(self) -> dict[Any, Generator]:
        """Finds the layers' generators, each time anew: code may replace them between epochs."""
        found: dict[Any, Generator] = {"numpy": NUMPY, "python": PYTHON}
        for place, module in enumerate(self._modules):
            named = vars(module).items()
            found |= {(place, name): value for name, value in named if is_generator(value)}
        return found


def _taken_apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """A span's distinct input tensors, and a function, holding none, that rebuilds the input."""
    flat, tree = pytree.tree_flatten(value, is_leaf=lambda node: isinstance(node, SparseTensor))
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    # (value, None, None), (None, index, None) or, for a sparse tensor, (grid, index, coordinates).
    parts: list[tuple[Any, int | None, _SharedCoordinates | None]] = []
    for leaf in flat:
        tensor = leaf.feats if isinstance(leaf, SparseTensor) else leaf
        if not isinstance(tensor, Tensor):
            parts.append((leaf, None, None))
            continue
        place = places.setdefault(id(tensor), len(tensors))
        if place == len(tensors):
            tensors.append(tensor)
        grid, level = None, None
        if isinstance(leaf, SparseTensor):
            names, cache = ("spatial_shape", "batch_size", "stride"), leaf.cache
            grid = {name: getattr(leaf, name) for name in names}
            made = _SharedCoordinates(cache.coords_N4, weakref.ref(cache), cache.bare())
            level = _levels.setdefault(cache, made)
        parts.append((grid, place, level))

    def put_together(kept: Sequence[Tensor]) -> Any:
        found: list[Any] = []
        for part, place, level in parts:
            if level is not None and place is not None:
                # The first run's cache, or, if that is gone, the one that second runs share.
                cache = level.first() or level.bare
                found.append(SparseTensor(kept[place], level.coords_N4, cache=cache, **part))
            else:
                found.append(part if place is None else kept[place])
        return pytree.tree_unflatten(found, tree)

    return tensors, put_together


class _SharedCoordinates(NamedTuple):
    """Coordinates, a weak reference to the first run's cache, an empty cache for second runs."""

    coords_N4: Tensor
    first: weakref.ref[CoordinateCache]
    bare: CoordinateCache


_levels: WeakKeyDictionary[CoordinateCache, _SharedCoordinates] = WeakKeyDictionary()
"""Entries by first runs' caches; spans share one if their inputs are on the same sites."""
