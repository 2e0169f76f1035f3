"""Spans of layers whose activations are not kept: their backward runs them forward once more.

Of a span only its input stays (``torch.utils.checkpoint``, not reentrant, so that the graph, and
with it the order of every sum, is that without recomputation). The second run differs from the
first in nothing that counts and leaves nothing behind: generators are as they were at the first
(torch's by ``checkpoint`` or by keys, others by :class:`RepeatedDraws`) and afterwards as before
the second; norm layers get copies of their statistics, so that these are updated once; kernel maps
are built anew where nobody has them any more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

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
    among,
    attributes_of,
    changed,
    put,
    put_back,
    states_of,
)
from sparsepipe.sparse import CoordinateCache, SparseTensor
from sparsepipe.sparse.saving import letting_derived_go

Through = Callable[[Any, Callable[[int], None]], Any]
"""Runs the layers of a span on a value; calls its second argument with the number of each layer
that has run."""

_again = ContextVar("_again", default=False)


def recomputing() -> bool:
    """Whether the layers that run do so for the second time, in the backward."""
    return _again.get()


class RecomputedSpan:
    """Layers that follow one another, of which only the input is kept for the backward.

    Args:
        layers: the Sequential.
        span: numbers of the entries.
        randomness: that the layers are keyed with; None: the generators as they are.
    """

    def __init__(
        self, layers: nn.Sequential, span: range, *, randomness: KeyedRandomness | None
    ) -> None:
        self._layers = layers
        self._randomness = randomness
        modules = [(number, inner) for number in span for inner in layers[number].modules()]
        self._draws = RepeatedDraws(modules)
        self._norms = [module for _, module in modules if isinstance(module, _NormBase)]
        self._others = [
            (number, module) for number, module in modules if not isinstance(module, _NormBase)
        ]

    def __call__(self, value: Any, through: Through) -> Any:
        """Runs the layers so that their activations go.

        Args:
            value: input of the span, a pytree.
            through: runs the layers; it is called again in the backward.

        Raises:
            ConfigError: a layer works in place on the span's input, which is kept, or changes a
                buffer that a second run would change again, or makes a random generator.
        """
        boundary = _Boundary(value)
        statistics = [
            (module, name, tensor.clone())
            for module in self._norms
            if module.training
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        drawn: Drawn = {}
        waiting = [value]  # for the first run, which has the sparse tensors' caches
        del value

        def run(*tensors: Tensor) -> Any:
            with letting_derived_go():
                if waiting:
                    with self._watching(tensors) as watch, self._draws.noting(drawn):
                        return through(waiting.pop(), watch)
                with self._second(statistics), self._draws.repeating(drawn):
                    return through(boundary.put_together(tensors), lambda layer: None)

        keyed = self._randomness is not None  # each layer sets the generators itself
        return checkpoint(
            run, *boundary.hand_over(), use_reentrant=False, preserve_rng_state=not keyed
        )

    @contextmanager
    def _watching(self, kept: Sequence[Tensor]) -> Iterator[Callable[[int], None]]:
        """Refuses layers that a second run would not find as the first did."""
        versions = [tensor._version for tensor in kept]
        buffers = [
            (number, name, tensor, tensor._version)
            for number, module in self._others
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]

        def watch(layer: int) -> None:
            if any(a._version != b for a, b in zip(kept, versions, strict=True)):
                raise self._in_place(layer)

        yield watch
        for number, name, tensor, version in buffers:
            if tensor._version != version:
                raise self._unrepeatable(number, name)

    @contextmanager
    def _second(self, statistics: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
        """As it was at the first run; afterwards all is as before."""
        with ExitStack() as stack:
            if self._randomness is not None:
                stack.enter_context(self._randomness.preserved())
            for module, name, tensor in statistics:
                stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                module._buffers[name] = tensor.clone()
            stack.callback(_again.reset, _again.set(True))
            yield

    def _in_place(self, layer: int) -> ConfigError:
        return ConfigError(
            f"layer {layer} ({_kind(self._layers[layer])}) works in place on the input of layers "
            "that are to be recomputed, which must be kept for that",
            remedy=f"give layer {layer} inplace=False, or begin the layers to be recomputed with "
            "one that leaves its input as it is",
        )

    def _unrepeatable(self, layer: int, name: str) -> ConfigError:
        return ConfigError(
            f"layer {layer} ({_kind(self._layers[layer])}) changes its buffer {name!r} whenever "
            "it runs, and would change it twice where it is recomputed",
            remedy=f"leave layer {layer} out of the layers to be recomputed",
        )


class _Boundary:
    """The input of a span, taken apart into tensors that autograd keeps, and what they are in."""

    def __init__(self, value: Any) -> None:
        flat, self._tree = pytree.tree_flatten(
            value, is_leaf=lambda node: isinstance(node, SparseTensor)
        )
        self._tensors: dict[int, Tensor] = {}
        self._builders = [self._builder(leaf) for leaf in flat]

    def hand_over(self) -> list[Tensor]:
        """The tensors, each once, which this lets go of."""
        tensors = list(self._tensors.values())
        self._tensors.clear()
        return tensors

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """The same value of the tensors that autograd has kept."""
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
    """Coordinates, with what is derived from them as long as somebody else has it.

    Attributes:
        coords_N4: of the sites.
    """

    def __init__(self, cache: CoordinateCache) -> None:
        self.coords_N4 = cache.coords_N4
        self._first = weakref.ref(cache)
        self._bare = cache.bare()

    def cache(self) -> CoordinateCache:
        """The cache of the first run; or else one that the second runs of all spans share."""
        return self._first() or self._bare


_levels: WeakKeyDictionary[CoordinateCache, _Level] = WeakKeyDictionary()


def _level_of(cache: CoordinateCache) -> _Level:
    """One for all spans that begin at the same coordinates."""
    return _levels.setdefault(cache, _Level(cache))


def _kind(layer: nn.Module) -> str:
    return type(layer).__name__


_Name = tuple[int | str, int, str]
"""Number of a layer, or name of a file; a count that tells modules apart; and the name there."""
Drawn = dict[_Name, Any]
"""The states that generators had before a run that drew from them."""


class RepeatedDraws:
    """What layers may draw from, but for torch's global generators, which others take care of.

    The global generators of numpy and python; attributes of the layers' modules, and of objects
    that are attributes of these; what is global in the files of the modules' classes; and in each
    of these places what is in a list, a tuple or a dictionary.

    Args:
        modules: with the numbers of their layers.
    """

    def __init__(self, modules: Sequence[tuple[int, nn.Module]]) -> None:
        self._modules = modules
        self._files = _files_of([module for _, module in modules])

    @contextmanager
    def noting(self, drawn: Drawn) -> Iterator[None]:
        """Around the first run; what it draws from is put into ``drawn``, most often nothing.

        Raises:
            ConfigError: a layer makes, replaces or drops a generator, so that the second run would
                not find those of the first.
        """
        before = self._generators()
        states = states_of(before)
        yield
        after = self._generators()
        names = before.keys() | after.keys()
        if others := [name for name in names if before.get(name) is not after.get(name)]:
            name = min(others, key=str)
            does = "makes" if name not in before else "replaces" if name in after else "drops"
            raise self._unrepeatable(name, does)
        drawn.update(changed(states, states_of(after)))

    @contextmanager
    def repeating(self, drawn: Mapping[_Name, Any]) -> Iterator[None]:
        """Around the second run, after which generators go on where they were before it."""
        if not drawn:
            yield
            return
        there = self._generators()
        replaced = put((there[name], state) for name, state in drawn.items() if name in there)
        try:
            yield
        finally:
            put_back(replaced)

    def _generators(self) -> dict[_Name, Generator]:
        """Looked for whenever layers run: modules may be given others, as an epoch begins."""
        found: dict[_Name, Generator] = {("numpy", 0, ""): NUMPY, ("python", 0, ""): PYTHON}
        for place, (number, module) in enumerate(self._modules):
            for name, value in attributes_of(module):
                found[number, place, name] = value
        for file in self._files:
            for name, value in among(vars(file)):
                found[file.__name__, 0, name] = value
        return found

    def _unrepeatable(self, generator: _Name, does: str) -> ConfigError:
        number, place, name = generator
        if isinstance(number, str):
            who = f"a layer that is to be recomputed {does} a random generator, {name} in {number},"
        else:
            kind = type(self._modules[place][1]).__name__
            who = f"layer {number} {does} a random generator, {name!r} of its {kind},"
        return ConfigError(
            f"{who} when it runs, and would draw something else where it is recomputed",
            remedy="make its generators before training, in __init__ for example, and keep them; "
            "or leave that layer out of the layers to be recomputed",
        )


def _files_of(modules: Sequence[nn.Module]) -> list[ModuleType]:
    """Where the classes of modules are written, but for those of torch and of this package."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds} & sys.modules.keys()
    ours = ("builtins", "torch", "sparsepipe")
    return [sys.modules[name] for name in sorted(names) if name.split(".")[0] not in ours]
