"""Random generators that layers may draw from, their states, and seeds for each layer.

Supported are the global generators of torch, numpy and Python, and generators that are attributes
of an ``nn.Module``; not those in lists, in other objects or in global variables of a file.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
FormerStates = list[tuple[Generator, Any]]

NUMPY: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]
"""Numpy's global generator."""
PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

_HOST = torch.device("cpu")
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Cached: every microbatch looks for generators and torch.Generator's isinstance runs Python.
_are_generators: dict[type, bool] = {}


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
        """Context for calls of :meth:`key`; at its end it restores torch's generators."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield

    def key(self, *, minibatch: int, layer: int) -> None:
        """Seeds torch's generators for layer index ``layer`` in this minibatch of the whole run."""
        text = f"{self.seed} {minibatch} {layer}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator whose state can be read and set."""
    kind = type(value)
    if kind not in _are_generators:
        settable = issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)
        _are_generators[kind] = settable
    return _are_generators[kind]


def states_of(generators: Mapping[Any, Generator]) -> dict[Any, Any]:
    """Returns copies of the generators' states, under the same keys."""
    return {name: _state_of(generator) for name, generator in generators.items()}


def states_before_draws(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states in ``before`` that have changed by ``after``, or whose keys are missing there."""
    return {
        name: state
        for name, state in before.items()
        if name not in after or not _same(state, after[name])
    }


def swap_states(states: Iterable[tuple[Generator, Any]]) -> FormerStates:
    """Sets the states of generators; returns the previous ones, in the same order."""
    chosen = list(states)
    replaced = [(generator, _state_of(generator)) for generator, _ in chosen]
    set_states(chosen)
    return replaced


def set_states(states: Iterable[tuple[Generator, Any]]) -> None:
    for generator, state in states:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, torch.Generator | np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(state)


@contextmanager
def states_preserved(generators: Iterable[Generator]) -> Iterator[None]:
    """Context that restores the present states of generators at its end."""
    states = [(generator, _state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        set_states(states)


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
