"""A run's configuration as the begin of another command: ``sparsepipe --from RUN [overrides]``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sparsepipe.config.compose import (
    CONFIG_NAME,
    admit,
    config_loader,
    directories_in,
    groups_of,
)
from sparsepipe.config.run_spec import read_settings
from sparsepipe.config.scales import STUDY
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading
from sparsepipe.utils.files import expanded

log = logging.getLogger(__name__)

FLAG = "--from"
_NOT_TAKEN = ("force", "hydra", STUDY)
"""Keys that belong to a command, not to what it runs."""
_KEY = re.compile(r"[A-Za-z_][\w-]*")


def from_run(arguments: Sequence[str]) -> list[str]:
    """The arguments, with a run's configuration as overrides in the place of ``--from RUN``.

    These are the overrides that the run was begun with, so that what follows from one setting still
    does, and behind them whatever its ``config.yaml`` has otherwise: paths, and values that have
    changed their defaults since. The command's own overrides come last. A group that the command
    chooses takes the place of all that the run had in it.

    Args:
        arguments: of the command line.

    Raises:
        ConfigError: there is no such run, or a value cannot be written as an override.
    """
    source, rest = without_flag(arguments)
    if source is None:
        return rest
    run = _values_of(source)
    own = [_name(word) for word in rest if _is_override(word)]
    loader = config_loader(directories_in(rest))
    chosen = [name for name in own if name in set(groups_of(loader))]

    def replaced(key: str) -> bool:
        return key in own or any(key.startswith(f"{group}.") for group in chosen)

    words = [str(word) for word in (run.get("hydra") or {}).get("overrides") or ()]
    try:
        begun = _composed(loader, words)
    except (HydraException, OmegaConfBaseException) as error:  # of another version, or directories
        log.warning(
            "the overrides that %s was begun with no longer compose (%s): all of its values are "
            "taken as they are, so that none follows from another one any more, such as data.seed "
            "from seed",
            source,
            str(error).partition("\n")[0],
        )
        words, begun = [], _composed(loader, [])
    taken = {key: value for key, value in run.items() if key not in _NOT_TAKEN}
    words = [word for word in words if not replaced(_name(word))]
    words += [word for key, word in _differing(begun, taken, "") if not replaced(key)]
    place = next((n for n, word in enumerate(rest) if _is_override(word)), len(rest))
    return [*rest[:place], *words, *rest[place:]]


def without_flag(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run that a command names behind ``--from``, and the command without that."""
    rest = list(arguments)
    for number, word in enumerate(rest):
        if word.startswith(f"{FLAG}="):
            return word.partition("=")[2], rest[:number] + rest[number + 1 :]
        if word == FLAG:
            if number + 1 == len(rest):
                raise ConfigError(f"{FLAG} names no run", remedy="name a run's directory behind it")
            return rest[number + 1], rest[:number] + rest[number + 2 :]
    return None, rest


def _values_of(source: str) -> dict[str, Any]:
    path = expanded(source)
    config = path / "config.yaml" if path.is_dir() else path
    remedy = f"name a run's directory, or its config.yaml, behind {FLAG}"
    with reading.explained(config, "configuration of a run", error=ConfigError, remedy=remedy):
        values = read_settings(config)
        reading.mapping(values.get("task"), "task")
    return values


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _name(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _composed(loader: Any, words: Sequence[str]) -> dict[str, Any]:
    config = loader.load_configuration(CONFIG_NAME, admit(words), run_mode=RunMode.RUN)
    with open_dict(config):
        del config["hydra"]
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key not in _NOT_TAKEN}


def _differing(begun: Any, run: Any, path: str) -> Iterator[tuple[str, str]]:
    """Keys and the overrides that make the values of a run of those it was begun with."""
    if not isinstance(run, Mapping) or not run:
        if begun != run:
            yield path, f"++{path}={_written(run, path)}"
        return
    there = begun if isinstance(begun, Mapping) else {}
    if "_target_" in run:  # elsewhere a key that a version did not have yet has its default
        for key in there:
            if key not in run:
                name = _join(path, key)
                if there[key] is None:  # which Hydra takes for missing
                    yield name, f"++{name}=0"
                yield name, f"~{name}"
    for key, value in run.items():
        if key not in there or there[key] != value:
            yield from _differing(there.get(key, _Nothing), value, _join(path, key))


class _Nothing:
    """Stands for a value that is not there."""


def _join(path: str, key: Any) -> str:
    if not _KEY.fullmatch(str(key)):
        raise ConfigError(
            f"the run has a key {key!r} in '{path}', which no override can name",
            remedy="give the command of the run again, with what is to be different",
        )
    return f"{path}.{key}" if path else str(key)


def _written(value: Any, path: str) -> str:
    """A plain value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = re.sub(r"(\\*)'", r"\1\1\\'", value.replace("${", "\\${"))
        return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
    if isinstance(value, list):
        return f"[{','.join(_written(each, path) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = [
            f"{_join(path, k).rpartition('.')[2]}: {_written(v, path)}" for k, v in value.items()
        ]
        return "{" + ", ".join(pairs) + "}"
    return str(value)
