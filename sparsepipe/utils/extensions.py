"""Extension points: objects of this package by name, those of others by dotted path."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsepipe.errors import ConfigError

T = TypeVar("T")


class DottedPath(str):
    """Type of an option that also takes the dotted path of a callable, by which it is imported."""

    __slots__ = ()


def is_dotted_path(name: object) -> bool:
    """Whether a name is a dotted path to a callable of another package."""
    return isinstance(name, str) and "." in name


def by_name(name: str, known: Mapping[str, T], *, kind: str) -> T | Callable[..., Any]:
    """An object of this package by its name, or a callable by its dotted path.

    Args:
        name: of one of ours, or ``package.module.callable``.
        known: ours, by their names.
        kind: what it is, for errors.

    Raises:
        ConfigError: there is none of this name, or the path leads to nothing that can be called;
            the message has the nearest name.
    """
    if name in known:
        return known[name]
    if is_dotted_path(name):
        return _imported(name, kind)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise ConfigError(
        f"there is no {kind} {name!r}" + (f" (nearest: {near[0]!r})" if near else ""),
        remedy=f"use {', '.join(known)}, or the dotted path of your own: package.module.name",
    )


_TRUSTED = ("sparsepipe.models", "sparsepipe.data", "sparsepipe.sparse", "torch.nn", "torch.optim")
"""Whose classes and functions may be called because a file says so."""


def is_trusted(path: str) -> bool:
    """Whether a dotted path leads to a network, data or an optimizer of SparsePipe or PyTorch.

    What modules of these import is not theirs, though a path may lead there.
    """
    if not path.startswith(tuple(f"{each}." for each in _TRUSTED)):
        return False
    try:
        found = _imported(path, "callable")
    except ConfigError:
        return False
    while isinstance(found, functools.partial):
        found = found.func
    made_in = str(getattr(found, "__module__", ""))
    return f"{made_in}.".startswith(tuple(f"{each}." for each in _TRUSTED))


def build_trusted(node: Any) -> Any:
    """What a file says how to build: nodes with ``_target_``, as Hydra instantiates them.

    Args:
        node: plain values.

    Raises:
        ConfigError: a target is not trusted, see :func:`is_trusted`.
    """
    if isinstance(node, list):
        return [build_trusted(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    values = {key: build_trusted(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return values
    path, partial = str(node["_target_"]), values.pop("_partial_", False)
    values.pop("_convert_", None)
    if not is_trusted(path):
        raise ConfigError(
            f"{path} is not called because a file names it",
            remedy="build the object yourself and pass it in place of what the file holds",
        )
    made = functools.partial(_imported(path, "callable"), **values)
    return made if partial else made()


def _imported(path: str, kind: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _unusable(path, kind, f"there is no module {error.name!r}") from error
    if (found := getattr(module, name, None)) is None:
        names = [each for each in vars(module) if not each.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise _unusable(path, kind, f"{module_name} has no {name!r}{hint}")
    if not callable(found):
        raise _unusable(path, kind, "it cannot be called")
    called: Callable[..., Any] = found
    return called


def _unusable(path: str, kind: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the {kind} {path!r} cannot be used: {reason}",
        remedy="give the full dotted path of a class or function that can be imported",
    )
