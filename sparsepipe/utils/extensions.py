"""Extension points: finds objects of this package by name, and others by dotted path."""

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
TRUSTED = ("sparsepipe.models", "sparsepipe.data", "sparsepipe.sparse", "torch.nn", "torch.optim")
"""Packages whose classes may be called when a file, such as a checkpoint, names them."""
_FUNCTIONS = ("sparsepipe.models.", "sparsepipe.data.sources.", "torch.nn.functional.")
"""Prefixes of modules whose functions may be called too: others write files or change torch."""
INSTRUCTIONS = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")
"""Keys that say how an object is built, and are not arguments of its callable."""


def _dotted(name: str) -> str:
    if "." not in name:
        raise PydanticCustomError("dotted_path", "should be the dotted path of a callable")
    return name


DottedPath = Annotated[str, AfterValidator(_dotted)]
"""Type of an option whose value may be the dotted path of a callable to import."""


def nearest(name: str, known: Iterable[str], *, prefix: str = "", lists: bool = False) -> str:
    """Returns a hint such as " (nearest: 'adam')"; an empty text if no valid name is similar.

    Args:
        name: the invalid name.
        known: all valid names.
        prefix: text before the nearest name in the hint.
        lists: whether the hint lists all valid names if none is similar.
    """
    options = list(known)
    if found := difflib.get_close_matches(name, options, n=1, cutoff=0.4):
        return f" (nearest: '{prefix}{found[0]}')"
    return f" (valid names: {', '.join(sorted(options)) or 'none'})" if lists else ""


def imported(path: str, *, kind: str = "target") -> Callable[..., Any]:
    """Imports a callable such as ``package.module.Class.method``; a ConfigError says why it cannot.

    Args:
        path: the dotted path.
        kind: what the callable is used as, for error messages.
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
                continue  # the rest of the path may be in a class
            reason = f"its module needs {error.name}, which is not installed"
            raise ConfigError(f"{what}: {reason}", remedy=f"install {error.name}") from error
        for name in parts[length:]:
            if not hasattr(found, name):
                reason = f"{module_name} has no {name}{nearest(name, vars(found))}"
                raise ConfigError(f"{what}: {reason}", remedy=remedy)
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"{what}: it is not callable", remedy=remedy)
        called: Callable[..., Any] = found
        return called
    raise ConfigError(f"{what}: module {parts[0]} not found", remedy=remedy)


def by_name(name: str, known: Mapping[str, T], *, kind: str) -> T | Callable[..., Any]:
    """Finds an object of this package by its name, or imports a callable by its dotted path.

    Args:
        name: a key of ``known``, or ``package.module.callable``.
        known: objects of this package by their names.
        kind: what the object is, for error messages.
    """
    if name in known:
        return known[name]
    if "." in name:
        return imported(name, kind=kind)
    raise ConfigError(
        f"unknown {kind} '{name}'{nearest(name, known)}",
        remedy=f"name one of {', '.join(known)}, or give the dotted path of your own",
    )


def is_trusted(path: str) -> bool:
    """Returns whether a dotted path leads to a class of a :data:`TRUSTED` package, or to a
    function that builds a network or a source, or computes.

    Callables that these packages import from elsewhere are not trusted.
    """
    trusted = tuple(f"{each}." for each in TRUSTED)
    if not path.startswith(trusted):
        return False
    try:
        found: Any = imported(path)
    except ConfigError:
        return False
    while isinstance(found, functools.partial):
        found = found.func
    module = f"{getattr(found, '__module__', '')}."
    return module.startswith(trusted if isinstance(found, type) else _FUNCTIONS)


def build_node(
    node: Any, locate: Callable[[str], Callable[..., Any]] = imported, **given: Any
) -> Any:
    """Builds the objects that plain values describe, as Hydra would, but takes every text as it is:
    no interpolation is resolved.

    Args:
        node: plain values, in which mappings with ``_target_`` describe objects.
        locate: finds the callable of a dotted path.
        given: arguments of the outermost object, which take precedence and are not built.
    """
    if isinstance(node, list | tuple):
        return [build_node(each, locate) for each in node]
    if not isinstance(node, Mapping):
        return node
    if node.get("_recursive_") is False:
        values = dict(node)
    else:
        values = {key: build_node(value, locate) for key, value in node.items()}
    if "_target_" not in node:
        return values
    arguments = {key: value for key, value in values.items() if key not in INSTRUCTIONS}
    found = locate(str(node["_target_"]))
    made = functools.partial(found, *values.get("_args_", ()), **{**arguments, **given})
    return made if node.get("_partial_") else made()


def build_trusted(node: Any) -> Any:
    """Builds the objects that a file describes, as :func:`build_node`; raises a ConfigError if one
    needs a callable that is not trusted.
    """

    def locate(path: str) -> Callable[..., Any]:
        if not is_trusted(path):
            raise ConfigError(
                f"the file names {path}, but only callables of {', '.join(TRUSTED)} are called",
                remedy="build the object yourself and pass it instead",
            )
        return imported(path)

    return build_node(node, locate)
