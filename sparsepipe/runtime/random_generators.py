"""Random generators: keyed by minibatch and layer, and the states of those that modules hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRandomness:
    """Seeds torch's generators for each layer, so that a run does not depend on its plan.

    Args:
        seed: of the run.
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
        """What is drawn next belongs to this layer.

        Args:
            minibatch: number in the whole run.
            layer: number in the Sequential.
        """
        text = f"{self.seed} {minibatch} {layer}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)


Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
Replaced = list[tuple[Generator, Any]]
"""Generators and the states that they had."""

NUMPY: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]
"""Numpy's global generator."""
PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = (list, tuple, dict)
_OF_MODULES = vars(torch.nn.Module()).keys()
"""Attributes of every module: its parameters, buffers, children and hooks."""


# Steps look for generators in every microbatch, and torch.Generator answers isinstance in Python.
@lru_cache(maxsize=4096)
def _are_generators(kind: type) -> bool:
    """Whether values of a type are generators whose state can be known: SystemRandom has none."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


@lru_cache(maxsize=4096)
def _to_look_into(kind: type) -> bool:
    return _are_generators(kind) or issubclass(kind, _CONTAINERS)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator whose state can be known."""
    return _are_generators(type(value))  # type: ignore[arg-type]


def among(values: Mapping[str, Any]) -> Iterator[tuple[str, Generator]]:
    """The generators of a namespace, and of lists, tuples and dictionaries in it, by name."""
    for name, value in values.items():
        if _to_look_into(type(value)):  # type: ignore[arg-type]
            yield from _held(name, value)


def attributes_of(
    owner: Any, *, but: Container[str] = _OF_MODULES
) -> Iterator[tuple[str, Generator]]:
    """Generators that are attributes of a module, or of an object that is one, by name.

    Args:
        owner: the module.
        but: attributes that are not looked at.
    """
    own = {name: value for name, value in vars(owner).items() if name not in but}
    yield from among(own)
    for name, value in own.items():
        if isinstance(value, torch.nn.Module):  # which has its own turn
            continue
        for inner, found in among(getattr(value, "__dict__", {})):
            yield f"{name}.{inner}", found


def _held(name: str, value: Any) -> Iterator[tuple[str, Generator]]:
    """A value that is a generator; those of a container that has some, such as ``rngs[0]``."""
    if is_generator(value):
        yield name, value
    elif value:
        items = value.values() if isinstance(value, dict) else value
        if not any(map(_are_generators, set(map(type, items)))):
            return  # as of most, some of which are long
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if is_generator(item):
                yield f"{name}[{key!r}]", item


def states_of(generators: Mapping[Any, Generator]) -> dict[Any, Any]:
    """States of generators; later draws leave them as they are."""
    return {name: state_of(generator) for name, generator in generators.items()}


def changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states before of those generators that were drawn from, or are gone."""
    return {
        name: state
        for name, state in before.items()
        if name not in after or not _same(state, after[name])
    }


def put(states: Iterable[tuple[Generator, Any]]) -> Replaced:
    """Sets states; those that they replace."""
    chosen = list(states)
    replaced = [(generator, state_of(generator)) for generator, _ in chosen]
    put_back(chosen)
    return replaced


def put_back(states: Iterable[tuple[Generator, Any]]) -> None:
    """Sets the states of generators."""
    for generator, state in states:
        _set(generator, state)


@contextmanager
def undrawn(generators: Iterable[Generator]) -> Iterator[None]:
    """Takes back what is drawn within."""
    states = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        put_back(states)


def state_of(generator: Generator) -> Any:
    """Its state, which later draws leave as it is."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(v, second[k]) for k, v in first.items())
    return bool(first == second)
