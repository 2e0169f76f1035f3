"""Random generators that a step may draw from: the global ones, and those of one's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

_CUDA = "torch.cuda"  # on ranks with such a device only
_LIGHTNINGS = vars(pl.LightningModule()).keys()
"""Attributes of every LightningModule, such as its Trainer, which is large and draws nothing."""


def generators_of(module: nn.Module | None, layers: nn.Sequential) -> dict[str, Generator]:
    """What a step may draw from outside of its layers, by names that all ranks share.

    The global generators of torch, numpy and python; attributes of the module, of its
    children, and of objects that are attributes of these, but for Lightning's own; what is global
    in the files of the module's classes; and in each of these places what is in a list, a tuple or
    a dictionary.

    Args:
        module: the LightningModule; None for the global generators alone.
        layers: its Sequential, whose own generators are drawn from where its entries run.
    """
    found: dict[str, Generator] = {
        "torch": torch.default_generator,
        "numpy": NUMPY,
        "python": PYTHON,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[_CUDA] = torch.cuda.default_generators[torch.cuda.current_device()]
    if module is None:
        return found
    for kind in type(module).__mro__:
        if kind not in pl.LightningModule.__mro__ and kind.__module__ in sys.modules:
            shared = among(vars(sys.modules[kind.__module__]))
            found |= {f"{name} of {kind.__name__}'s file": value for name, value in shared}
    for path, child in module.named_modules(memo={layers}):  # all but the layers
        prefix = f"self.{path}." if path else "self."
        found |= {prefix + name: value for name, value in attributes_of(child, but=_LIGHTNINGS)}
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
