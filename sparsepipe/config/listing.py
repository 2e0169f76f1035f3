"""Lists configuration groups and options: ``sparsepipe --help``, and the task ``list``.

The line about an option is the first sentence of its file's first comment; the line about a group
and its default option are in the defaults list of ``config.yaml``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from hydra.conf import ConfigSourceInfo

from sparsepipe.errors import ConfigError
from sparsepipe.utils.extensions import nearest

PARTS = "base"
"""Name of directories whose files are parts of options and not options themselves."""
_DEFAULT = re.compile(
    r"^  - (?:override )?(?P<group>[\w/]+): (?P<option>\S+)(?: +# (?P<line>.+))?$"
)
# Up to a full stop before a capital letter ("Fig. 9" goes on), or a semicolon outside brackets.
_SENTENCE = re.compile(r"(?:\([^)]*\)|[^(])*?(?:\.(?= [A-Z]|$)|;(?= |$))")
_HELP = """\
Sparse 3D networks on CAD shapes and point clouds, trained in parallel.

sparsepipe [experiment=NAME] [task=train|evaluate|predict|profile|bandwidth|partition|simulate|
    emulate|fit_batch|measure_steps|report|compare|clean|list]
    [scale=smoke|desk|paper] [group=option ...] [key=value ...]

  sparsepipe                            # a first training, on few generated shapes
  sparsepipe experiment=demo
  sparsepipe experiment=demo model.width=0.5 trainer.max_epochs=10
  sparsepipe parallel=hete_mp hardware=two_speeds
  sparsepipe task=simulate hardware=paper_5gpu parallel=hete_mp
  sparsepipe task=evaluate checkpoint=outputs/demo/<run id>
  sparsepipe task=predict checkpoint=outputs/demo/<run id> input=FILE|FOLDER|PATTERN
  sparsepipe --from outputs/demo/<run id> seed=1
  sparsepipe -m experiment=demo seed=0,1,2
  sparsepipe task=list                  # all groups and options below, with a line each

Groups and their options:

{groups}

The run directory is the last line printed. The same command goes on with an interrupted
run and skips a finished one; force=true starts anew.

  --from RUN            start from the configuration of a run, given by its directory
  --cfg job             print the whole configuration with these overrides
  -m                    run every combination of the values in lists, with a table at the end
  --config-dir DIR      add options of the groups from your own directory
  -sc install=bash      complete groups, options and keys: eval "$(sparsepipe -sc install=bash)"
  --hydra-help          show Hydra's own options
"""
_HEAD = "Groups with their defaults and options, to choose from: sparsepipe GROUP=OPTION ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a configuration group, which is a YAML file.

    Args:
        name: path of the file within the group, without ``.yaml``.
        line: first sentence of the comment at its top; empty without one.
    """

    name: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A configuration group: a line about it, its options, and the name of the default option."""

    name: str
    line: str = ""
    default: str | None = None
    options: tuple[Option, ...] = ()


def list_options(
    directories: Sequence[Traversable], *, width: int, group: str | None = None
) -> str:
    """Formats the groups and their options as a table.

    Args:
        directories: directories of groups, SparsePipe's own first; if two have options of the
            same name, the first counts.
        width: width of the text in characters.
        group: the only group in the table; None: all.
    """
    groups = groups_in(directories)
    names = [found.name for found in groups]
    if group is not None and group not in names:
        raise ConfigError(
            f"unknown group '{group}'{nearest(group, names, lists=True)}",
            remedy="leave task.group out to list all groups",
        )
    shown = [found for found in groups if group in (None, found.name)]
    column = max(len(option.name) for found in shown for option in found.options)
    blocks = []
    for found in shown:
        head = f"{found.name}={found.default}" if found.default else found.name
        lines = textwrap.wrap(f"{head}  {found.line}", width=width, subsequent_indent="    ")
        for option in found.options:
            lines += textwrap.wrap(
                option.line or "(its file begins without a comment)",
                width=max(width, column + 24),
                initial_indent=f"  {option.name.ljust(column)}  ",
                subsequent_indent=" " * (column + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks if group else [_HEAD, *blocks])


list_options.prints_only = True  # type: ignore[attr-defined]


def help_text(directories: Sequence[Traversable]) -> str:
    """The text of ``sparsepipe --help``; Hydra would need seconds to find the groups."""
    options: dict[str, list[str]] = {}
    for group in groups_in(directories):
        for option in group.options:
            directory, _, name = f"{group.name}/{option.name}".rpartition("/")
            options.setdefault(directory, []).append(name)
    lines = (f"{directory}: {', '.join(names)}" for directory, names in sorted(options.items()))
    return _HELP.format(groups="\n".join(lines))


def groups_in(directories: Sequence[Traversable]) -> list[Group]:
    """Reads the groups in configuration directories; those of the defaults list come first."""
    defaults: dict[str, re.Match[str]] = {}
    options: dict[str, dict[str, Option]] = {}
    for directory in directories:
        file = directory / "config.yaml"
        for line in file.read_text().splitlines() if file.is_file() else ():
            if match := _DEFAULT.match(line):
                defaults.setdefault(match["group"], match)
                options.setdefault(match["group"], {})
    for directory in directories:
        for place in _sorted(directory):
            below = _sorted(place) if place.is_dir() else []
            has_options = any(entry.name.endswith(".yaml") for entry in below)
            inner = {f"{place.name}/{entry.name}": entry for entry in below if entry.is_dir()}
            for name, group in ({place.name: place} if has_options else inner).items():
                for option in _options(group):
                    options.setdefault(name, {}).setdefault(option.name, option)
    return [
        Group(
            name=name,
            line=(match["line"] or "") if (match := defaults.get(name)) else "",
            default=match["option"] if match and match["option"] != "null" else None,
            options=tuple(sorted(found.values(), key=lambda option: option.name)),
        )
        for name, found in options.items()
        if found
    ]


def _options(directory: Traversable, *, below: str = "") -> Iterator[Option]:
    for entry in _sorted(directory):
        if entry.is_dir():
            yield from _options(entry, below=f"{below}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            name = below + entry.name.removesuffix(".yaml")
            yield Option(name=name, line=first_comment(entry.read_text()))


def _sorted(directory: Traversable) -> list[Traversable]:
    """Entries of a directory, sorted by name, without :data:`PARTS` and hidden or private ones."""
    entries = (each for each in directory.iterdir() if each.name[0] not in "._")
    return sorted((each for each in entries if each.name != PARTS), key=lambda each: each.name)


def directories_of(sources: Iterable[ConfigSourceInfo]) -> list[Traversable]:
    """The directories among Hydra's configuration sources, except those inside Hydra."""
    found: list[Traversable] = []
    for source in sources:
        if source.schema == "file" and Path(source.path).is_dir():
            found.append(Path(source.path))
        elif source.schema == "pkg" and source.path.partition(".")[0] not in ("hydra", ""):
            found.append(resources.files(source.path))
    return found


def first_comment(text: str) -> str:
    """The first sentence of the comment at the top of a YAML file; empty without one."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#  "):
            break  # an indented line of a comment is an example
        words.append(line.removeprefix("# ").strip())
    first_lines = " ".join(words)
    sentence = _SENTENCE.match(first_lines)
    return (sentence.group() if sentence else first_lines).rstrip(" .:;")
