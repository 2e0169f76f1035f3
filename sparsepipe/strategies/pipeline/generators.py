"""Random generators that a step may draw from: the global ones, and those of one's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
Replaced = list[tuple[Generator, Any]]
"""Generators and the states that they had."""

_CUDA = "torch.cuda"  # on ranks with such a device only


def generators_of(module: nn.Module | None, layers: nn.Sequential) -> dict[str, Generator]:
    """What a step may draw from outside of its layers, by names that all ranks share.

    The global generators of torch, numpy and python; attributes of the module, of its
    children, and of objects that are attributes of these; and what is global in the files
    of the module's classes.

    Args:
        module: the LightningModule; None for the global generators alone.
        layers: its Sequential, whose own generators are drawn from where its entries run.
    """
    found: dict[str, Generator] = {
        "torch": torch.default_generator,
        "numpy": np.random.get_state.__self__,  # type: ignore[attr-defined]
        "python": random.getstate.__self__,  # type: ignore[attr-defined]
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[_CUDA] = torch.cuda.default_generators[torch.cuda.current_device()]
    if module is None:
        return found
    for kind in type(module).__mro__:
        if kind not in pl.LightningModule.__mro__ and kind.__module__ in sys.modules:
            shared = _among(vars(sys.modules[kind.__module__]))
            found |= {f"{name} of {kind.__name__}'s file": value for name, value in shared}
    for path, child in module.named_modules(memo={layers}):  # all but the layers
        prefix = f"self.{path}." if path else "self."
        found |= {prefix + name: value for name, value in _attributes(child)}
    return found


def is_generator(value: Any) -> bool:
    """Whether a value is a generator whose state can be known."""
    # SystemRandom has no state.
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def states_of(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """States of generators; later draws leave them as they are."""
    return {name: _state(generator) for name, generator in generators.items()}


def drawn_from(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """States before a step of those generators that it drew from.

    Raises:
        ConfigError: the step made a generator.
    """
    for name in sorted(after.keys() - before.keys() - {_CUDA}):
        raise ConfigError(
            f"the step makes a random generator, {name}, and the last stage would make another",
            remedy="make it in __init__, so that every rank has it before its first step",
        )
    return {
        name: state
        for name, state in before.items()
        if name not in after or not _same(state, after[name])
    }


def put_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> Replaced:
    """Sets states of another rank's; those that they replace.

    Raises:
        ConfigError: a generator is not on this rank.
    """
    missing = sorted(states.keys() - generators.keys() - {_CUDA})
    if missing:
        raise ConfigError(
            f"the step draws from {missing[0]}, which is a random generator on the first stage "
            "and none on the last",
            remedy="make it in __init__, on every rank",
        )
    chosen = [(generators[name], state) for name, state in states.items() if name in generators]
    replaced = [(generator, _state(generator)) for generator, _ in chosen]
    put_back(chosen)
    return replaced


def put_back(states: Iterable[tuple[Generator, Any]]) -> None:
    """Sets the states of generators."""
    for generator, state in states:
        _set(generator, state)


@contextmanager
def undrawn(generators: Iterable[Generator]) -> Iterator[None]:
    """Takes back what is drawn within."""
    states = [(generator, _state(generator)) for generator in generators]
    try:
        yield
    finally:
        put_back(states)


def _attributes(owner: nn.Module) -> Iterator[tuple[str, Generator]]:
    yield from _among(vars(owner))
    for name, value in vars(owner).items():
        if not isinstance(value, nn.Module) and not is_generator(value):
            for inner, found in _among(getattr(value, "__dict__", {})):
                yield f"{name}.{inner}", found


def _among(values: Mapping[str, Any]) -> list[tuple[str, Generator]]:
    return [(name, value) for name, value in values.items() if is_generator(value)]


def _state(generator: Generator) -> Any:
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
