"""Pages of the configuration reference, from conf/ and the schema; mkdocs is not needed.

Comments and defaults are read from the YAML files as they are written; types are those that the
schema checks, or those of the parameters of a ``_target_``.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from sparsepipe.config.check import node_in
from sparsepipe.config.listing import Group, groups_in
from sparsepipe.config.schema import Config
from sparsepipe.config.target import parameters_of

GENERAL = "general"
_HEAD = ("| key | default | type | |", "|---|---|---|---|")
_LISTED = re.compile(r"^ {2,}(\w+) {2,}")  # a value and what it means
_OWN_LINE = re.compile(r"^ *# ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as a file writes it.

    Args:
        value: its text; None where it is a mapping, whose keys follow.
        comment: what stands behind or above it.
        type: what it may be, in words.
    """

    value: str | None
    comment: str
    type: str = ""


def pages(conf: Path) -> dict[str, str]:
    """The Markdown of each page by its name: the index, the general keys, and a page a group."""
    groups = groups_in([conf])
    outside = Config.__dataclass_fields__.keys() - {group.name for group in groups}
    top = _of_dataclass(Config) | keys_of(conf, "config")
    general = {name: key for name, key in top.items() if name.split(".")[0] in outside}
    rows = (
        f"| `{name}` | {_value(key)} | {_text(key.type)} | {_text(key.comment)} |"
        for name, key in _typed("", general).items()
    )
    found = {"index": _index(groups)}
    found[GENERAL] = "\n".join(["# Keys outside the groups\n", *_HEAD, *rows])
    return found | {_page_name(group): "\n".join(_page(conf, group)) for group in groups}


def _page_name(group: Group) -> str:
    return group.name.replace("/", "-")


def keys_of(conf: Path, name: str, at: str = "") -> dict[str, Key]:
    """Keys of a file and of those in its defaults list, by their dotted names below ``at``."""
    text = (conf / f"{name}.yaml").read_text(encoding="utf-8")
    body = yaml.compose(text)
    own = dict(_keys(body, text.splitlines(), at))
    own.pop(_join(at, "defaults"), None)
    defaults = [*(yaml.safe_load(text) or {}).get("defaults", [])]
    found: dict[str, Key] = {}
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            found = _merged(found, own)
        elif isinstance(entry, str):
            base, _, package = entry.partition("@")
            place = _join(at, "" if package.startswith("_") else package)
            if base.startswith("/"):
                found = _merged(found, keys_of(conf, base[1:], place))
    return found


def _keys(body: yaml.Node | None, lines: list[str], at: str) -> Iterator[tuple[str, Key]]:
    if not isinstance(body, yaml.MappingNode):
        return
    for key, value in body.value:
        name, nested = _join(at, key.value), isinstance(value, yaml.MappingNode)
        flow = getattr(value, "flow_style", True) is not False
        written = value.start_mark.buffer[value.start_mark.pointer : value.end_mark.pointer]
        end = value.end_mark if flow else key.end_mark
        comment = _comment(lines, key.start_mark.line, end.column if flow else end.column + 1)
        if nested and not flow:
            yield name, Key(value=None, comment=comment)
            yield from _keys(value, lines, name)
        else:
            yield name, Key(value=written if flow else "a list", comment=comment)


def _comment(lines: list[str], line: int, column: int) -> str:
    """What is said behind a key, or in lines above it that are not the head of the file."""
    behind = re.match(r" *# (.*)", lines[line][column:])
    above: list[str] = []
    indent = len(lines[line]) - len(lines[line].lstrip())
    while line and re.match(rf" {{{indent}}}#", lines[line - 1]):
        line -= 1
        above.insert(0, _LISTED.sub(r"\n`\1` ", _OWN_LINE.sub("", lines[line])).rstrip())
    return " ".join([*(above if line else []), *(behind.groups() if behind else ())])


def _merged(found: Mapping[str, Key], own: Mapping[str, Key]) -> dict[str, Key]:
    """As Hydra merges: a mapping into a mapping, and any other value in place of what was."""
    merged = dict(found)
    for name, key in own.items():
        before = merged.get(name)
        if key.value is not None:
            merged = {old: kept for old, kept in merged.items() if not old.startswith(f"{name}.")}
        above = name.rpartition(".")[0]
        if above in merged:  # a mapping from now on, where it was null
            merged[above] = Key(value=None, comment=merged[above].comment)
        comment = key.comment or (before.comment if before else "")
        merged[name] = Key(value=key.value, comment=comment)
    return merged


def _typed(group: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    """Keys with their types: of the schema, or of the target of the mapping that they are in."""
    known = _schema_types(Config)
    for name, key in keys.items():
        target = re.fullmatch(r"(?:(.*)\.)?_target_", name)
        if target and key.value and "$" not in key.value:
            for parameter, hint in parameters_of(key.value).types.items():
                known.setdefault(_join(group, _join(target[1] or "", parameter)), hint)
    return {
        name: Key(value=key.value, comment=key.comment, type=_words(known.get(_join(group, name))))
        for name, key in keys.items()
    }


def _schema_types(schema: type, at: str = "") -> dict[str, Any]:
    found = {}
    hints = typing.get_type_hints(schema, include_extras=True)
    for entry in fields(schema):
        hint, name = hints[entry.name], _join(at, entry.name)
        nodes = list(node_in(hint))
        kinds = [nodes[0].own] if nodes else [hint, *typing.get_args(hint)]
        inner = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
        known = None if nodes else hint
        found |= _schema_types(inner[0], name) if inner else {name: known}
    return found


def _of_dataclass(schema: type) -> dict[str, Key]:
    """Fields that have a default: configuration files may leave them out."""
    source, hints = inspect.getsource(schema), typing.get_type_hints(schema)
    found = {}
    for entry in fields(schema):
        if entry.default is MISSING and entry.default_factory is MISSING:
            continue
        behind = re.search(rf"^    {entry.name}: .*?  # (.*)$", source, re.MULTILINE)
        value = yaml.safe_dump(entry.default if entry.default is not MISSING else []).split("\n")[0]
        found[entry.name] = Key(value=value, comment=behind[1] if behind else "")
        inner = (kind for kind in typing.get_args(hints[entry.name]) if is_dataclass(kind))
        for below in inner:
            found |= {_join(entry.name, name): key for name, key in _of_dataclass(below).items()}
    return found


def _page(conf: Path, group: Group) -> Iterator[str]:
    yield f"# {group.name}"
    chosen = f"; `{group.name}={group.default}` is the default" if group.default else ""
    yield f"\n{_text(group.line[:1].upper() + group.line[1:])}{chosen}.\n" if group.line else ""
    yield from ("| option | |", "|---|---|")
    for option in group.options:
        yield f"| [`{option.name}`](#{option.name.replace('/', '-')}) | {_text(option.line)} |"
    entry = Config.__dataclass_fields__.get(group.name)
    if entry is not None:
        hint = typing.get_type_hints(Config, include_extras=True)[group.name]
        own = next((node.own for node in node_in(hint)), None)
        yield from ("\n## Keys\n", *_HEAD)
        yield from _rows(conf, group, {} if own is None else _of_dataclass(own))
    for option in group.options:
        text = (conf / group.name / f"{option.name}.yaml").read_text(encoding="utf-8")
        yield f"\n## {option.name} {{ #{option.name.replace('/', '-')} }}\n\n```yaml\n{text}```"


def _rows(conf: Path, group: Group, own: Mapping[str, Key]) -> Iterator[str]:
    """Keys of all options, those in the same mapping after each other."""
    names = [option.name for option in group.options]
    names.sort(key=lambda name: name != group.default)
    each = {
        name: _typed(group.name, {**own, **keys_of(conf, f"{group.name}/{name}")}) for name in names
    }
    keys = list(dict.fromkeys(key for found in each.values() for key in found))
    tops = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    for key in sorted(keys, key=lambda key: tops.index(key.partition(".")[0])):
        having = {name: each[name][key] for name in names if key in each[name]}
        comment = next((found.comment for found in having.values() if found.comment), "")
        words = next((found.type for found in having.values() if found.type), "")
        said = f"{_text(comment)} {_which(list(having), names)}".strip()
        yield f"| `{_join(group.name, key)}` | {_values(having)} | {_text(words)} | {said} |"


def _values(having: Mapping[str, Key]) -> str:
    """The default of a key; where options differ, that of each, as far as there is room."""
    options: dict[str, list[str]] = {}
    for name, key in having.items():
        options.setdefault(_value(key), []).append(name)
    if len(options) == 1:
        return next(iter(options))
    if len(options) > 4:
        return "each its own"
    return "<br>".join(f"{value or 'a mapping'} ({', '.join(options[value])})" for value in options)


def _value(key: Key) -> str:
    return "" if key.value is None else f"`{' '.join(key.value.split()) or 'null'}`"


def _which(having: list[str], names: list[str]) -> str:
    """Says which options have a key, where not all have it."""
    without = [name for name in names if name not in having]
    if not without:
        return ""
    few, word = (having, "only") if len(having) <= len(without) else (without, "all but")
    return f"*({word} {', '.join(f'`{name}`' for name in sorted(few))})*"


def _index(groups: list[Group]) -> str:
    lines = [
        "# Configuration\n",
        "`group=option` on the command line takes another file of a group, `group.key=value`",
        "changes a value. These pages are made from `conf/` and from the schema against which a",
        "configuration is checked. `sparsepipe task=list` prints groups and options,",
        "`sparsepipe --cfg job` every key of a run with its value. The keys of",
        "`hydra/launcher=sparsepipe` are in the guide to [sweeps](../docs/sweeps.md).\n",
        "| group | default | |",
        "|---|---|---|",
    ]
    for group in groups:
        default = f"`{group.default}`" if group.default else ""
        lines.append(
            f"| [{group.name}]({_page_name(group)}.md) | {default} | {_text(group.line)} |"
        )
    return "\n".join([*lines, f"| [outside the groups]({GENERAL}.md) | | name, seed, paths, … |"])


def _text(text: str) -> str:
    """Plain text as Markdown for a cell; documents that it names become links."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [
        re.sub(r"([\\*_{}\[\]])", r"\\\1", part).replace("|", "&#124;").replace("<", "&lt;")
        for part in parts[::2]
    ]
    linked = re.sub(r"docs/(\w+)\.md", r"[\1.md](../docs/\1.md)", "".join(parts))
    return linked.replace("\n", "<br>")


_TERMS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path",
    type(None): "null", list: "a list", tuple: "a list", dict: "a mapping",
}  # fmt: skip


def _words(hint: Any) -> str:
    """A type hint in words; classes that YAML cannot write are left out of unions."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is Any:
        return ""
    if origin in (typing.Union, types.UnionType):
        options = [each for each in arguments if each in _TERMS or not isinstance(each, type)]
        return " or ".join(map(_words, options or arguments))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is typing.Annotated:
        notes = [note for each in arguments[1:] for note in getattr(each, "metadata", ())]
        least = [f"from {each.ge}" for each in notes if hasattr(each, "ge")]
        most = [f"to {each.le}" for each in notes if hasattr(each, "le")]
        return " ".join([_words(arguments[0]), *least, *most])
    found = _TERMS.get(hint if origin is None else origin)
    return found or re.sub(
        r"<class '(?:\w+\.)*(\w+)'>|\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1\2", str(hint)
    )


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
