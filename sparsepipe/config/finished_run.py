"""Merges a finished run's configuration with the overrides of a new command.

``--from RUN`` takes over the whole configuration; tasks that measure a checkpoint take over the
model, data and backend of its training.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from sparsepipe.config.run_spec import (
    DIRECTORY,
    NOT_IDENTITY,
    flatten,
    is_below,
    nested,
    read_settings,
)
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading
from sparsepipe.utils.extensions import TRUSTED, is_trusted
from sparsepipe.utils.files import expanded

log = logging.getLogger(__name__)

RECORD = "sparsepipe"
"""Key of a checkpoint that holds the configuration of its training."""
CLASSES = "classes"
"""Name in ``task.allow`` that permits classes other than those of the training."""
GROUPS = ("model", "data", "backend")
"""Groups that a task which measures a checkpoint takes from the training."""
_VALUES = ("representation", "seed")
_PRECISIONS = ("trainer.precision", "trainer.matmul_precision")
FROM_RUN = "from_run"
"""Key that names the configuration file of the run given with ``--from``."""
NOT_REPLAYED = ("checkpoint", "checkpoint_strict", "data.cache_dir", "data.root", "input", "paths")
"""Keys and groups whose overrides a run does not record; ``--from`` reads their values instead."""
NOT_RECORDED = (*NOT_REPLAYED, "force", FROM_RUN, "hydra", "logger")
"""Prefixes of the overrides and group choices that a run does not record."""
_FLAG = "--from"
_RESOLVER = re.compile(r"\$\{[^}]*[:$]")
"""Finds an interpolation that calls a function, such as ``${oc.env:HOME}``."""
_SAMPLES = (
    *("batch_size", "strict", "val_share", "seed", "sampling_seed", "augment", "source", "split"),
    *("group", "crop_points", "crop_size", "crops_per_scene"),
    *("patches_per_volume", "batches_per_epoch", "balance"),
    "evaluated",  # of data of several domains
)
"""Keys of data that decide which samples are read, and how many at a time, but not how a sample is
processed: an evaluation may set them differently from the training."""
_PLACES = ("cache_dir", "learning_map", "root", "split")
"""Keys of data whose values may be paths."""


def replayed(arguments: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Replaces ``--from RUN`` with an override that names the run, and with the run's overrides.

    They come before the command's overrides; settings computed from others follow both. If the
    command chooses an option of a group, the run's overrides of this group are left out.

    Args:
        arguments: arguments of the command line.
        groups: names of all groups.
    """
    joined = f"{_FLAG}="
    words = [
        part
        for word in arguments
        for part in ([_FLAG, word[len(joined) :]] if word.startswith(joined) else [word])
    ]
    if _FLAG not in words:
        return words
    place = words.index(_FLAG)
    config = expanded("".join(words[place + 1 : place + 2]))
    config = config if config.is_file() else config / "config.yaml"
    del words[place : place + 2]
    remedy = f"name a run's directory, or its config.yaml, after {_FLAG}"
    with reading.explained(config, "configuration of a run", error=ConfigError, remedy=remedy):
        command = reading.mapping(read_settings(config).get("hydra"), "hydra")
        recorded = list(map(str, reading.listing(command.get("overrides"), "overrides")))
    is_override = re.compile(r"~|[^-].*=").match
    first = next((n for n, word in enumerate(words) if is_override(word)), len(words))
    names = {
        word: word.lstrip("+~").partition("=")[0].partition("@")[0]
        for word in (*recorded, *words[first:])
    }
    own = {names[word] for word in words[first:]}
    chosen = tuple(f"{group}." for group in groups if group in own)
    kept = [
        word for word in recorded if names[word] not in own and not names[word].startswith(chosen)
    ]
    for word in kept:
        keys = re.split("[@:]", word.lstrip("+~").partition("=")[0])  # with those of packages
        outside = any(key.startswith(NOT_RECORDED) for key in keys)
        # Hydra removes backslashes before OmegaConf sees the value.
        if outside or not is_override(word) or _RESOLVER.search(word.replace("\\", "")):
            raise ConfigError(
                f"{config} records the override {reading.shown(word)}, which is not that of a "
                "setting, or calls a function",
                remedy="set its key in this command, which replaces it, or correct the file",
            )
    path = str(config.absolute()).replace("'", "\\'")
    return [*words[:first], f"++{FROM_RUN}='{path}'", *kept, *words[first:]]


def begun_from(raw: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Returns ``raw`` with the :data:`NOT_REPLAYED` values of the run ``from_run``, if it is set.

    Keys and groups that the overrides ``given`` set keep their values.
    """
    if not raw.get(FROM_RUN):
        return dict(raw)
    recorded = read_settings(Path(raw[FROM_RUN]))
    own = [word for word in given if word.lstrip("+") not in recorded["hydra"]["overrides"]]
    return _merged(raw, recorded, NOT_REPLAYED, _set_by(own))


def as_trained(raw: Mapping[str, Any], given: Sequence[str], training: Training) -> dict[str, Any]:
    """Returns ``raw`` with a training's model, data, backend, representation, seed and precisions.

    Args:
        raw: composed values, with unresolved interpolations.
        given: the command's overrides; keys and groups that they set keep their values.
        training: the training of the checkpoint that is measured.
    """
    keys, then = _set_by(given), training.values
    values = _VALUES[1:] if "model" in keys else _VALUES  # a new model sets its own
    kept = _merged(raw, then, (*GROUPS, *values, *_PRECISIONS), keys)
    for group, name in itertools.product(("model", "data"), _VALUES):
        # data.seed still follows seed if it did in the training.
        ours, theirs = (each.get(group) or {} for each in (raw, then))
        follows = (
            ours.get(name) == f"${{{name}}}" and name in theirs and theirs[name] == then.get(name)
        )
        if follows and not is_below(f"{group}.{name}", keys):
            kept[group][name] = ours[name]
    return kept


def _set_by(given: Sequence[str]) -> set[str]:
    """The keys and groups that the overrides ``given`` set."""
    found: set[str] = set()
    with suppress(HydraException):  # which Hydra has already reported
        for override in OverridesParser.create().parse_overrides(list(given)):
            name, value = override.key_or_group, override.value()
            below = flatten(value) if isinstance(value, dict) else {}
            found |= {f"{name}.{key}" for key in below} or {name}
    return found


def _merged(
    raw: Mapping[str, Any], recorded: Mapping[str, Any], names: Iterable[str], keys: set[str]
) -> dict[str, Any]:
    """Returns ``raw`` with recorded values of the keys and groups ``names``, except of ``keys``."""
    ours, theirs, kept = flatten(raw), flatten(_escaped(recorded)), copy.deepcopy(dict(raw))
    for name in names:
        taken = {k: v for k, v in theirs.items() if is_below(k, (name,)) and not is_below(k, keys)}
        if taken:
            ours = {k: v for k, v in ours.items() if not is_below(k, (name,)) or is_below(k, keys)}
            ours |= taken
            top = name.partition(".")[0]
            kept[top] = nested({k: v for k, v in ours.items() if is_below(k, (top,))})[top]
    return kept


def _escaped(value: Any) -> Any:
    """Escapes ``${`` in resolved values, and backslashes before it, for OmegaConf."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Training:
    """The recorded configuration of a checkpoint's training.

    Args:
        origin: the file that records it.
        values: plain values, nested as in configuration files.
    """

    origin: Path
    values: Mapping[str, Any]


def training_of(source: str, *, command: Mapping[str, Any] | None = None) -> Training | None:
    """Reads the configuration of a checkpoint's training from its run's directory, else from the
    checkpoint; None if neither contains it.

    The settings of a checkpoint alone may be a stranger's: they name only callables that are
    trusted or that the command names too, depend on nothing in the environment, and caches are kept
    where they are by default.

    Args:
        source: a checkpoint or a run directory, as given with ``checkpoint=``.
        command: the configuration of the command that reads it, if any.
    """
    path = expanded(source).absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    for config in dict.fromkeys((path / "config.yaml", run / "config.yaml")):
        if config.is_file():
            try:
                values = read_settings(config)
                if _has_nodes(values):
                    return Training(config, _located(values))
                reason = "it is not the configuration of a run"
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
            log.warning("%s cannot be read (%s); using the checkpoint's own record", config, reason)
    files = (path, *(run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")))
    if (file := next((each for each in files if each.is_file()), None)) is None:
        return None
    from sparsepipe.utils.values_only import load_values  # slow: torch

    try:
        recorded = load_values(file, mmap=True)[RECORD]["config"]
    except Exception:  # not a checkpoint, or one without a record: the task reports what is wrong
        return None
    if not (isinstance(recorded, dict) and _has_nodes(recorded)):
        return None
    remedy = (
        "if you trust it, pass its path inside its run's directory, whose config.yaml is trusted"
    )
    named = [value for key, value in _entries(command or {}) if key == "_target_"]
    for key, value in _entries(recorded):
        text = value if isinstance(value, str) else ""
        if "." in key or "${" in text or os.path.expanduser(os.path.expandvars(text)) != text:
            raise ConfigError(
                f"{file} records {reading.shown(key)}: {reading.shown(value)}, but settings that a "
                "checkpoint records are plain values: without ${...}, variables, ~ or dotted keys",
                remedy=remedy,
            )
        if key == "_target_" and value not in named and not is_trusted(str(value)):
            raise ConfigError(
                f"{file} names the callable {value}, but without the config.yaml of its run, a "
                f"checkpoint may only name callables of {', '.join(TRUSTED)}",
                remedy=f"{remedy}; or name it in the command, as in model._target_={value}",
            )
    data, place = flatten(recorded["data"]), os.environ.get("SPARSEPIPE_DATA") or "data"
    cache = os.path.join(place, "cache")  # as in conf/paths/default.yaml
    data |= {name: cache for name in data if name.rpartition(".")[2] == "cache_dir"}
    return Training(file, {**recorded, "data": nested(data)})


def _has_nodes(values: Mapping[str, Any]) -> bool:
    nodes = [values.get(name) for name in ("model", "data")]
    return all(isinstance(n, Mapping) and isinstance(n.get("_target_"), str) for n in nodes)


def _located(values: dict[str, Any]) -> dict[str, Any]:
    """Makes paths of the data that exist only in the training's working directory absolute."""
    command = values.get("hydra")
    directory = command.get(DIRECTORY) if isinstance(command, Mapping) else None
    if not isinstance(directory, str) or directory == os.getcwd():
        return values
    data = flatten(values["data"])
    for name, value in data.items():
        key = name.rpartition(".")[2]
        if key in _PLACES and isinstance(value, str) and value and not os.path.exists(value):
            path = os.path.join(directory, value)
            needed = os.R_OK | os.W_OK if key == "cache_dir" else os.R_OK
            data[name] = path if os.access(path, needed) else value
    return {**values, "data": nested(data)}


def _entries(node: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields each key and value in a node, at any depth; an empty key for an item of a list."""
    for key, value in node.items() if isinstance(node, Mapping) else (("", each) for each in node):
        yield str(key), value
        if isinstance(value, Mapping | list | tuple):
            yield from _entries(value)


def recorded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its checkpoints record: network, inputs, optimizer, precisions.

    Paths of the data are recorded as they are now, with ``~`` and environment variables expanded.
    """
    kept = {key: values[key] for key in (*GROUPS, *_VALUES, "loss", "optim") if key in values}
    data = flatten(kept.get("data") or {})
    for name, value in data.items():
        if name.rpartition(".")[2] in _PLACES and isinstance(value, str) and value:
            data[name] = os.path.expanduser(os.path.expandvars(value))
    kept = {**copy.deepcopy(kept), "data": nested(data)}
    precisions = {key: value for key, value in flatten(values).items() if key in _PRECISIONS}
    return {**kept, **nested(precisions)}


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting whose value differs from that in the training.

    Args:
        key: the dotted key.
        now: its value in the new run; None: not set.
        then: its value in the training; None: not set.
    """

    key: str
    now: Any
    then: Any

    def __str__(self) -> str:
        now, then = (
            "{}" if isinstance(value, Mapping) else "null" if value is None else value
            for value in (self.now, self.then)
        )
        return f"{self.key}={now} (trained with {then})"

    @property
    def contradicts(self) -> bool:
        """Whether the difference changes the network, or how its inputs are made."""
        if self.key == "representation" or self.key.startswith("model."):
            return True
        group, _, key = self.key.partition(".")
        return group == "data" and key.partition(".")[0] not in _SAMPLES and key != "root"


def differences(now: Mapping[str, Any], training: Training) -> list[Difference]:
    """Lists settings of network, inputs and precisions in ``now`` that differ from a training."""
    compared = []
    for values in (now, training.values):
        nodes = {group: _complete(values.get(group)) for group in GROUPS}
        found = flatten({**nodes, **{name: values.get(name) for name in _VALUES}})
        trainer = flatten({"trainer": values.get("trainer") or {}})
        found |= {key: trainer.get(key) for key in _PRECISIONS}
        compared.append(
            {k: v for k, v in found.items() if k == "data.root" or k not in NOT_IDENTITY}
        )
    ours, theirs = compared
    return [
        Difference(key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key)
    ]


def _complete(node: Any) -> dict[str, Any]:
    """Returns a node with the plain defaults of arguments that it lacks; {} if it is not a node."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        return {}
    try:
        parameters = inspect.signature(Target.parse(node).locate()).parameters.values()
    except (ConfigError, TypeError, ValueError):
        return dict(node)
    plain = (str, int, float, bool, type(None))
    defaults = {each.name: each.default for each in parameters if isinstance(each.default, plain)}
    return {**defaults, **node}
