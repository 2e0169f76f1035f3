"""Checks a composed configuration against the schema and the signatures of its targets.

Reports all problems at once, each with the nearest valid name or the expected type.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparsepipe.config.finished_run import GROUPS
from sparsepipe.config.schema import Config, Node
from sparsepipe.config.target import names_in_source, parameters_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import in_words, wrong_value
from sparsepipe.utils.extensions import INSTRUCTIONS, nearest

UNKNOWN_KEY = re.compile(r"unknown key '([^']*)'")
_WITHOUT_NODES = ("hydra", "paper", "runs")


def check(config: Mapping[str, Any]) -> None:
    """Checks a resolved configuration; raises a ConfigError with all problems.

    Targets are imported only if everything else is valid.
    """
    problems = [*check_fields(config, Config), *_misspelt(config)]
    if not problems:
        for path, value, node in _nodes(config):
            problems.extend(_check_node(value, node, path))
    _refuse(problems)


def check_names(raw: Mapping[str, Any]) -> None:
    """Raises a ConfigError for keys that the schema or the source of a node's target lacks.

    Imports no target and resolves no interpolation. Does not check groups that are replaced with
    those of a ``checkpoint``'s training.
    """
    replaced = GROUPS if raw.get("checkpoint") is not None else ()
    config = {key: value for key, value in raw.items() if key not in replaced}
    fixed = (each for each in check_fields(config, Config) if UNKNOWN_KEY.match(each))
    _refuse([*fixed, *_misspelt(config)])


def check_task(value: Mapping[str, Any]) -> None:
    """Checks ``value``, the node of a task that reads nothing else of the configuration."""
    _refuse([*_check_node(value, _descriptions()["task"], "task")])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(
            "; ".join(dict.fromkeys(problems)),
            remedy="correct the key or value; `sparsepipe --cfg job` with these "
            "overrides prints the whole configuration, `sparsepipe --help` its groups and options",
        )


_adapter = functools.cache(TypeAdapter[Any])


def check_fields(value: Any, schema: type) -> Iterator[str]:
    """Yields a text for each key of ``value`` that is missing, unknown or wrong in a dataclass."""
    try:
        _adapter(schema).validate_json(json.dumps(value))
        return
    except ValidationError as error:
        errors = error.errors()
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for each in errors:
        keys, inner = list[str](), value  # within a union, the location goes on with names of types
        for part in each["loc"]:
            if not isinstance(inner, Mapping) and keys:
                break
            keys.append(str(part))
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        by_path.setdefault(tuple(keys), []).append(each)
    for path, problems in by_path.items():
        name, kind = ".".join(path), problems[0]["type"]
        if kind == "missing":
            yield f"'{name}' is missing"
        elif kind == "unexpected_keyword_argument":
            owner = schema
            for part in path[:-1]:
                hint = typing.get_type_hints(owner)[part]
                kinds = (each for each in (hint, *typing.get_args(hint)) if is_dataclass(each))
                owner = typing.cast("type", next(kinds))
            names = [entry.name for entry in fields(owner)]
            yield unknown_key(path[-1], names, path=path[:-1])
        else:
            yield f"'{name}' {in_words(problems)}, not {problems[0]['input']!r}"


def unknown_key(name: Any, known: Iterable[str], *, path: Iterable[str] = ()) -> str:
    """The message that key ``name`` below ``path`` is unknown, with the nearest known name."""
    prefix = "".join(f"{part}." for part in path)
    return f"unknown key '{prefix}{name}'{nearest(str(name), known, prefix=prefix, lists=True)}"


def _misspelt(config: Mapping[str, Any]) -> Iterator[str]:
    for path, value, node in _nodes(config):
        known = names_in_source(str(value["_target_"]))
        if known is not None and "_args_" not in value:
            yield from _unknown(value, known - {"self"}, node, path)


def _unknown(
    value: Mapping[str, Any], known: Iterable[str], node: Node, path: str
) -> Iterator[str]:
    own = () if node.own is None else [entry.name for entry in fields(node.own)]
    names = [*known, *own]
    for key in value:
        if key in node.elsewhere and key not in names:
            yield f"unknown key '{path}.{key}' ({node.elsewhere[key]})"
        elif key not in INSTRUCTIONS and key not in names:
            yield unknown_key(key, names, path=(path,))


def _nodes(
    value: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any], Node]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and path + str(key) not in _WITHOUT_NODES:
            if "_target_" in item:
                known = _descriptions()
                node = known.get(f"{path}{key}") or known.get(f"{path}*") or Node()
                yield f"{path}{key}", item, node
            yield from _nodes(item, f"{path}{key}.")


@functools.cache
def _descriptions() -> dict[str, Node]:
    """Each :class:`Node` of the schema by its dotted path; ``*`` stands for any name."""
    found: dict[str, Node] = {}
    schemas = typing.get_type_hints(Config)
    for prefix in ("", "parallel.", "optim."):
        schema = schemas[prefix.rstrip(".")] if prefix else Config
        for name, hint in typing.get_type_hints(schema, include_extras=True).items():
            path = f"{prefix}{name}.*" if typing.get_origin(hint) is dict else f"{prefix}{name}"
            found.update((path, node) for node in node_in(hint))
    return found


def node_in(hint: Any) -> Iterator[Node]:
    """Yields each :class:`Node` that annotates a type hint of the schema or a part of it."""
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Node))
    for inner in typing.get_args(hint):
        yield from node_in(inner)


def _check_node(value: Mapping[str, Any], node: Node, path: str) -> Iterator[str]:
    try:
        target = parameters_of(value["_target_"])
    except ConfigError as error:
        yield f"'{path}._target_': {error.message}"
        return
    if not target.open:
        yield from _unknown(value, target.types, node, path)
    if not value.get("_partial_") and "_args_" not in value:
        for name in target.required:
            if name not in value and name not in node.given:
                yield f"'{path}.{name}' is missing"
    own = {} if node.own is None else typing.get_type_hints(node.own, include_extras=True)
    types = {**target.types, **own}
    for name, item in value.items():
        is_node = isinstance(item, Mapping) and "_target_" in item  # checked by itself
        if name in types and not is_node and (wrong := wrong_value(item, types[name])) is not None:
            yield f"'{path}.{name}' {wrong}, not {item!r}"
