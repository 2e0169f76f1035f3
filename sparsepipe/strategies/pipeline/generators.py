"""Random generators that a step may draw from: the global ones, and those of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.generators import (
    NUMPY,
    PYTHON,
    Generator,
    Replaced,
    among,
    attributes_of,
    changed,
    put,
)

Sources = Callable[[], dict[str, Generator]]
"""Gives generators by names that all ranks share."""

_CUDA = "torch.cuda"  # on ranks with such a device only


class OfStep:
    """The generators of a module's steps: :data:`Sources` that look for them once a step.

    Looking takes as long as a layer. So what there is before and after a step's first microbatch
    is what there is for its others.

    Args:
        module: the LightningModule.
        layers: its Sequential.
    """

    def __init__(self, module: nn.Module, layers: nn.Sequential) -> None:
        self._module = module
        self._layers = layers
        self._found: dict[str, Generator] = {}
        self._looks = 0

    def begin(self) -> None:
        """A step begins."""
        self._looks = 2  # before and after

    def __call__(self) -> dict[str, Generator]:
        if self._looks:
            self._looks -= 1
            self._found = generators_of(self._module, self._layers)
        return self._found


def global_ones() -> dict[str, Generator]:
    """The global generators of torch, numpy and python."""
    found: dict[str, Generator] = {
        "torch": torch.default_generator,
        "numpy": NUMPY,
        "python": PYTHON,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[_CUDA] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def generators_of(module: nn.Module, layers: nn.Sequential) -> dict[str, Generator]:
    """What a step may draw from outside of its layers, by names that all ranks share.

    The global generators; attributes of the module, of its
    children, and of objects that are attributes of these; what is global in the files of the
    module's classes; and in each of these places what is in a list, a tuple or a dictionary.

    Args:
        module: the LightningModule.
        layers: its Sequential, whose own generators are drawn from where its entries run.
    """
    found = global_ones()
    for kind in type(module).__mro__:
        if kind not in pl.LightningModule.__mro__ and kind.__module__ in sys.modules:
            shared = among(vars(sys.modules[kind.__module__]))
            found |= {f"{name} of {kind.__name__}'s file": value for name, value in shared}
    for path, child in module.named_modules(memo={layers}):  # all but the layers
        prefix = f"self.{path}." if path else "self."
        found |= {prefix + name: value for name, value in attributes_of(child)}
    return found


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
    return changed(before, after)


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
    return put((generators[name], state) for name, state in states.items() if name in generators)
