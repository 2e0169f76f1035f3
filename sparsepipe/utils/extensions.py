"""Extension points: objects of this package by name, those of others by dotted path."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from sparsepipe.errors import ConfigError

T = TypeVar("T")
_TRUSTED = ("sparsepipe.models", "sparsepipe.data", "sparsepipe.sparse", "torch.nn", "torch.optim")
"""Packages whose classes and functions may be called because a file says so."""


def _dotted(name: str) -> str:
    if "." not in name:
        raise PydanticCustomError("dotted_path", "should be the dotted path of your own")
    return name


DottedPath = Annotated[str, AfterValidator(_dotted)]
"""Type of an option that also takes the dotted path of a callable, by which it is imported."""


def nearest(name: str, known: Iterable[str], *, prefix: str = "", lists: bool = False) -> str:
    """A hint at the name that was probably meant, with a leading space; empty without a like one.

    Args:
        name: as somebody gave it.
        known: all valid names.
        prefix: is printed before the name.
        lists: all valid names are the hint where none is like it.
    """
    options = list(known)
    if found := difflib.get_close_matches(name, options, n=1, cutoff=0.4):
        return f" (nearest: '{prefix}{found[0]}')"
    return f" (valid names: {', '.join(sorted(options)) or 'none'})" if lists else ""


def imported(path: str, *, kind: str = "target") -> Callable[..., Any]:
    """The callable at a dotted path, such as ``package.module.Class.method``.

    Args:
        path: the dotted path.
        kind: what the callable is used as, for errors.
    """
    remedy = "give the full dotted path of a class or function that can be imported"
    what = f"the {kind} '{path}' cannot be used"
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue  # the tail may be a class
            reason = f"its module needs {error.name}, which is missing"
            raise ConfigError(f"{what}: {reason}", remedy=remedy) from error
        for name in parts[length:]:
            if not hasattr(found, name):
                reason = f"{module_name} has no {name}{nearest(name, vars(found))}"
                raise ConfigError(f"{what}: {reason}", remedy=remedy)
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"{what}: it cannot be called", remedy=remedy)
        called: Callable[..., Any] = found
        return called
    raise ConfigError(f"{what}: module {parts[0]} not found", remedy=remedy)


def by_name(name: str, known: Mapping[str, T], *, kind: str) -> T | Callable[..., Any]:
    """An object of this package by its name, or a callable by its dotted path.

    Args:
        name: of one of ours, or ``package.module.callable``.
        known: ours, by their names.
        kind: what it is, for errors.
    """
    if name in known:
        return known[name]
    if "." in name:
        return imported(name, kind=kind)
    raise ConfigError(
        f"unknown {kind} '{name}'{nearest(name, known)}",
        remedy=f"use {', '.join(known)}, or the dotted path of your own: package.module.name",
    )


def is_trusted(path: str) -> bool:
    """Whether a dotted path leads to a network, data or an optimizer of SparsePipe or PyTorch.

    Callables that such a module imports from elsewhere are not trusted.
    """
    trusted = tuple(f"{each}." for each in _TRUSTED)
    if not path.startswith(trusted):
        return False
    try:
        found: Any = imported(path)
    except ConfigError:
        return False
    while isinstance(found, functools.partial):
        found = found.func
    return f"{getattr(found, '__module__', '')}.".startswith(trusted)


def build_trusted(node: Any) -> Any:
    """Builds what a file describes: nodes with ``_target_``, as Hydra instantiates them.

    Args:
        node: plain values.
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
    made = functools.partial(imported(path), **values)
    return made if partial else made()
