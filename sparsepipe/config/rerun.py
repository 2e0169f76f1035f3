"""Start a command from a finished run's configuration: ``sparsepipe --from RUN [overrides]``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sparsepipe.config.compose import NOT_RECORDED, config_loader, directories_in, groups_of
from sparsepipe.config.run_spec import flatten, read_settings
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading
from sparsepipe.utils.files import expanded

FLAG = "--from"
_OF_COMMAND = ("force", "hydra", "logger")
"""Groups and keys that belong to a command, not to what it runs."""


def from_run(arguments: Sequence[str]) -> list[str]:
    """The arguments, with a run's overrides in the place of ``--from RUN``.

    These are the overrides that the run was begun with, so that what follows from one setting still
    does, and behind them the run's paths, checkpoint and input, which it does not record as
    overrides. The command's own overrides come last. A group that the command chooses takes the
    place of all that the run had in it.

    Args:
        arguments: of the command line.

    Raises:
        ConfigError: the run's configuration cannot be read, or lacks its overrides.
    """
    rest = [part for word in arguments for part in _split(word)]
    if FLAG not in rest:
        return rest
    place = rest.index(FLAG)
    if place + 1 == len(rest):
        raise ConfigError(f"{FLAG} names no run", remedy="name a run's directory behind it")
    source = expanded(rest[place + 1])
    del rest[place : place + 2]
    config = source / "config.yaml" if source.is_dir() else source
    remedy = f"name a run's directory, or its config.yaml, behind {FLAG}"
    with reading.explained(config, "configuration of a run", error=ConfigError, remedy=remedy):
        run = read_settings(config)
        command = reading.mapping(run.get("hydra"), "hydra")
        words = [str(word) for word in reading.listing(command.get("overrides"), "overrides")]
    kept = {key: value for key, value in flatten(run).items() if key.startswith(NOT_RECORDED)}
    words += [
        f"++{key}={_quoted(value)}"
        for key, value in kept.items()
        if not key.startswith(_OF_COMMAND)
    ]
    own = {_name(word) for word in rest if _is_override(word)}
    chosen = own & {*groups_of(config_loader(directories_in(rest)))}
    groups = tuple(f"{group}." for group in chosen)
    taken = [
        word for word in words if _name(word) not in own and not _name(word).startswith(groups)
    ]
    first = next((n for n, word in enumerate(rest) if _is_override(word)), len(rest))
    return [*rest[:first], *taken, *rest[first:]]


def _split(word: str) -> list[str]:
    return [FLAG, word.partition("=")[2]] if word.startswith(f"{FLAG}=") else [word]


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _name(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _quoted(value: Any) -> str:
    """A plain value in the grammar of overrides."""
    if not isinstance(value, str):
        return json.dumps(value)
    text = re.sub(r"(\\*)'", r"\1\1\\'", str(value).replace("${", "\\${"))
    return f"'{text}'"
