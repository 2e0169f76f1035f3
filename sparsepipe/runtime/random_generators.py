"""Random generators: those that layers may draw from, their states, and seeds for each layer.

Known are the global generators of torch, numpy and python, and generators that are attributes of a
module. Others, such as those in lists, in other objects or in a file's global names, are not
supported.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
Replaced = list[tuple[Generator, Any]]
"""Generators and the states that they had."""

NUMPY: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]
"""Numpy's global generator."""
PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

_HOST = torch.device("cpu")
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRandomness:
    """Seeds torch's generators for each minibatch and layer, so that no draw depends on the plan.

    Args:
        device: where the layers run; its generator is seeded as well as the host's.
    """

    seed: int
    device: torch.device = _HOST

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Inside, layers may be keyed; afterwards the generators are as they were before."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield

    def key(self, *, minibatch: int, layer: int) -> None:
        """Seeds the generators for what a layer draws next; minibatches count in the whole run."""
        text = f"{self.seed} {minibatch} {layer}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)


# Steps look for generators in every microbatch, and torch.Generator answers isinstance in Python.
@lru_cache(maxsize=4096)
def _are_generators(kind: type) -> bool:
    """Whether values of a type are generators whose state can be known: SystemRandom has none."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator whose state can be known."""
    return _are_generators(type(value))  # type: ignore[arg-type]


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Generator]]:
    """Generators that are attributes of a module, by name; those of its children are not."""
    return ((name, value) for name, value in vars(module).items() if is_generator(value))


def states_of(generators: Mapping[Any, Generator]) -> dict[Any, Any]:
    """States of generators; later draws leave them as they are."""
    return {name: _state_of(generator) for name, generator in generators.items()}


def changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states before of those generators that were drawn from, or are gone."""
    return {
        name: state
        for name, state in before.items()
        if name not in after or not _same(state, after[name])
    }


def put(states: Iterable[tuple[Generator, Any]]) -> Replaced:
    """Sets states; returns those that they replace."""
    chosen = list(states)
    replaced = [(generator, _state_of(generator)) for generator, _ in chosen]
    put_back(chosen)
    return replaced


def put_back(states: Iterable[tuple[Generator, Any]]) -> None:
    for generator, state in states:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(state)


@contextmanager
def undrawn(generators: Iterable[Generator]) -> Iterator[None]:
    """Takes back what is drawn within."""
    states = [(generator, _state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        put_back(states)


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(v, second[k]) for k, v in first.items())
    return bool(first == second)
