"""Checks a composed configuration against the schema, before anything is built.

Everything wrong is reported at once, each with the nearest name or the expected type.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from sparsepipe.config.schema import Config, Limits, Node, NodeMap
from sparsepipe.config.source_signature import Parameters
from sparsepipe.config.target import parameters_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils.extensions import DottedPath, is_dotted_path

_UNKNOWN = re.compile(r"unknown key '([^']*)'")
_INSTRUCTIONS = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")


def check(config: Mapping[str, Any]) -> None:
    """Checks a resolved configuration.

    Cheap checks come first: targets are imported only when the rest is sound.

    Raises:
        ConfigError: keys that are unknown or missing, values of a wrong type, targets that
            cannot be imported.
    """
    problems = list(check_fields(config, Config, path=""))
    if not problems:
        for path, value, node in _nodes(config):
            problems.extend(_check_node(value, node, path))
    _refuse(problems)


def check_task(value: Mapping[str, Any]) -> None:
    """Checks the task alone, for one that reads nothing else of the configuration.

    Raises:
        ConfigError: see :func:`check`.
    """
    node = Config.__dataclass_fields__["task"].metadata["node"]
    _refuse(list(_check_node(value, node, "task")))


def unknown_keys(error: ConfigError) -> set[str]:
    """The keys that the error of a check calls unknown."""
    return {*_UNKNOWN.findall(error.message)}


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(
            "; ".join(problems),
            remedy="correct the key or value; `sparsepipe --cfg job` prints the whole "
            "configuration with these overrides, `sparsepipe --help` its groups",
        )


def nearest(name: str, known: Iterable[str], *, path: str = "") -> str:
    """A hint at the name under ``path`` that was probably meant, with a leading space; empty where
    none is like it.
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" (nearest: '{_join(path, found[0])}')" if found else ""


def suggest(name: str, known: Iterable[str], *, path: str = "") -> str:
    """The hint of :func:`nearest`; where none is like it, all names that there are."""
    options = list(known)
    listed = f" (there are: {', '.join(sorted(options)) or 'none'})"
    return nearest(name, options, path=path) or listed


def check_fields(value: Any, schema: type, *, path: str = "") -> Iterator[str]:
    """What is wrong with values that are to be a dataclass's fields, each in words."""
    if not isinstance(value, Mapping):
        yield f"'{path}' must be a mapping, not {value!r}"
        return
    known = {entry.name: entry for entry in fields(schema)}
    hints = typing.get_type_hints(schema, include_extras=True)
    yield from _unknown(value, known, path)
    for name, entry in known.items():
        place = _join(path, name)
        if name not in value:
            if entry.default is MISSING and entry.default_factory is MISSING:
                yield f"'{place}' is missing"
        elif "node" in entry.metadata:
            yield from _check_node_shape(value[name], entry.metadata["node"], place)
        elif inner := dataclass_in(hints[name]):
            if value[name] is not None or type(None) not in typing.get_args(hints[name]):
                yield from check_fields(value[name], inner, path=place)
        else:
            yield from _check_value(value[name], hints[name], place)


def dataclass_in(hint: Any) -> type | None:
    """The dataclass that a type hint names, alone or in a union with None."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type)]
    return next((kind for kind in kinds if is_dataclass(kind)), None)


def _unknown(
    value: Mapping[str, Any], known: Iterable[str], path: str, node: Node | None = None
) -> Iterator[str]:
    names, elsewhere = list(known), {} if node is None else node.elsewhere
    for key in value:
        if key in elsewhere and key not in names:
            yield f"unknown key '{_join(path, key)}' ({elsewhere[key]})"
        elif key not in names:
            yield f"unknown key '{_join(path, key)}'{suggest(str(key), names, path=path)}"


def _check_node_shape(value: Any, kind: Node | NodeMap, path: str) -> Iterator[str]:
    if isinstance(kind, NodeMap):
        if not isinstance(value, Mapping):
            yield f"'{path}' must be a mapping from names to nodes with a _target_, not {value!r}"
            return
        for name, item in value.items():
            yield from _check_node_shape(item, kind.node, _join(path, name))
    elif value is None and kind.optional:
        return
    elif not isinstance(value, Mapping) or not isinstance(value.get("_target_"), str):
        keys = value if isinstance(value, Mapping) else ()
        hints = [f" ('{key}' is {kind.elsewhere[key]})" for key in keys if key in kind.elsewhere]
        yield f"'{path}' must be a mapping with a _target_, not {value!r}{''.join(hints[:1])}"


def _nodes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Node]]:
    hints = typing.get_type_hints(Config)
    for schema, path, part in (
        (Config, "", config),
        *((hints[name], name, config[name]) for name in ("parallel", "optim")),
    ):
        for entry in fields(schema):
            kind = entry.metadata.get("node")
            place, value = _join(path, entry.name), part.get(entry.name)
            if isinstance(kind, NodeMap):
                for name, item in (value or {}).items():
                    yield _join(place, name), item, kind.node
            elif kind is not None and value is not None:
                yield place, value, kind


def _check_node(value: Mapping[str, Any], node: Node, path: str) -> Iterator[str]:
    try:
        target = parameters_of(value["_target_"])
    except ConfigError as error:
        yield f"'{path}._target_': {error.message}"
        return
    arguments = {key: item for key, item in value.items() if key not in _INSTRUCTIONS}
    own = {} if node.own is None else typing.get_type_hints(node.own, include_extras=True)
    if not target.open:
        yield from _unknown(arguments, [*target.types, *own], path, node)
    if not value.get("_partial_") and "_args_" not in value:
        for name in target.required:
            if name not in arguments and name not in node.given:
                yield f"'{path}.{name}' is missing"
    for name, item in arguments.items():
        if name in own:
            yield from _check_value(item, own[name], _join(path, name))
        else:
            yield from _check_argument(item, name, target, _join(path, name))


def _check_argument(item: Any, name: str, target: Parameters, path: str) -> Iterator[str]:
    if isinstance(item, Mapping) and "_target_" in item:
        yield from _check_node(item, Node(), path)
    elif name in target.types:
        yield from _check_value(item, target.types[name], path)


def _check_value(value: Any, hint: Any, path: str) -> Iterator[str]:
    if not fits(value, hint):
        what = f"'{path}' must be {describe(hint)}"
        if is_number(value) and not _is_computable(value) and fits(0.5, hint):
            what += f" of at most {_LARGEST:g} in size"
        yield f"{what}, not {value!r}{_nearest_name(value, hint)}"


def _nearest_name(value: Any, hint: Any) -> str:
    """The name that was meant, of those that a hint allows."""
    options = [hint, *typing.get_args(hint)]
    names = [
        name
        for option in options
        if typing.get_origin(option) is typing.Literal
        for name in map(str, typing.get_args(option))
    ]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    return f" (nearest: {near[0]!r})" if near else ""


def fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value can serve as a ``hint``; hints beyond YAML's types accept all."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in _writable(arguments))
    if origin is typing.Literal:
        return value in arguments
    if origin is typing.Annotated:
        limits = [limit for limit in arguments[1:] if isinstance(limit, Limits)]
        return fits(value, arguments[0]) and all(limit.hold(value) for limit in limits)
    test = _FITS.get(hint if origin is None else origin)
    if test is None:
        return True
    of_one_kind = arguments and (origin is list or arguments[1:] == (...,))
    return test(value) and not (of_one_kind and any(not fits(item, arguments[0]) for item in value))


def describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in _writable(arguments))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is typing.Annotated:
        limits = [str(limit) for limit in arguments[1:] if isinstance(limit, Limits)]
        return " ".join([describe(arguments[0]), *limits])
    words = _WORDS.get(hint if origin is None else origin, str(hint))
    if arguments and (origin is list or arguments[1:] == (...,)) and arguments[0] in _PLURALS:
        return f"{words} of {_PLURALS[arguments[0]]}"
    return words


def _writable(options: tuple[Any, ...]) -> list[Any]:
    """A union's types that YAML can write; classes such as the tensor in ``float | Tensor`` accept
    all, and numbers would go unchecked.
    """
    found = [
        option
        for option in options
        if option in _FITS or option is Any or not isinstance(option, type)
    ]
    return found if set(found) - {type(None)} else list(options)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_LARGEST = 3.4e38
"""Networks are computed in single precision, which has no larger numbers."""


def _is_computable(value: Any) -> bool:
    """Whether a value is a number that computations can take."""
    return is_number(value) and abs(value) <= _LARGEST


_FITS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: _is_computable,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    DottedPath: is_dotted_path,
    Path: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
    list: lambda value: isinstance(value, list),
    tuple: lambda value: isinstance(value, list),
    dict: lambda value: isinstance(value, Mapping),
}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    DottedPath: "the dotted path of your own",
    Path: "a path",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
