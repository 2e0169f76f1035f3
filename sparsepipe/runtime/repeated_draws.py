"""Draws of layers that run twice: the second run finds generators as the first did."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.generators import (
    NUMPY,
    PYTHON,
    Generator,
    among,
    attributes_of,
    changed,
    put,
    put_back,
    states_of,
)

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
