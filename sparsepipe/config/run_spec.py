"""The configuration of one run, parsed once and handed on: ``RunSpec``."""

from __future__ import annotations

import copy
import io
import os
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self

from sparsepipe.config.check import dataclass_in
from sparsepipe.config.schema import Config as _Schema
from sparsepipe.config.schema import (
    Emulation,
    NodeMap,
    Optim,
    Parallel,
    Paths,
    SearchChoice,
    TrainerArguments,
)
from sparsepipe.config.target import Target, identity_name, present_name
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading

_EMULATION_KEYS = tuple(entry.name for entry in fields(Emulation))

SETTINGS_BYTES = 4 << 20
"""Of a config.yaml, which has a few kB."""
DIRECTORY = "directory"
"""The key below ``hydra`` of the working directory, from which relative paths were meant."""
_UNUSED = "none"
"""Target of a group that a run does not use."""
NOT_IDENTITY = (
    "data.cache_dir",
    "data.cache_workers",
    "data.lock_wait_s",
    "data.num_workers",
    "data.root",
    "force",
    "hardware",
    "hydra",
    "logger",
    "name",
    "objective",
    "parallel.devices",
    "parallel.grace_s",
    "parallel.max_restarts",
    "parallel.plan",
    "parallel.search",
    "parallel.strategy.timeout_s",
    "paths",
    "study",
    "tags",
    "task.gallery",
    "trainer.checkpoints",
    "trainer.enable_autolog_hparams",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.trace",
)
"""Keys that do not change what a run computes, or that a fingerprint, the number of ranks, the
plan or the search stands for."""
_ADDED: Mapping[str, Any] = {
    "checkpoint_strict": True,
    "input": None,
    "task.test_weights": "best",
}
"""Keys that identities leave out at these values: runs of versions without them keep theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A resolved and checked configuration.

    Made by :func:`sparsepipe.config.compose.resolve` or read from a run's directory; a changed copy
    is made by :meth:`replace`. The attributes are the groups and keys of the configuration; the
    plain values that they were parsed from are kept, so that files and identities have exactly the
    keys that were given. Under ``hydra`` they have the overrides and choices of the command.
    """

    name: str
    seed: int
    representation: Literal["sparse", "dense"]
    force: bool
    checkpoint: str | None
    objective: str | None
    paths: Paths
    parallel: Parallel
    optim: Optim
    trainer: TrainerArguments
    task: Target
    model: Target
    data: Target
    hardware: Target
    backend: Target
    logger: Mapping[str, Target]
    callbacks: Mapping[str, Target]
    checkpoint_strict: bool = True
    input: str | None = None
    tags: tuple[str, ...] = ()
    scale: str | None = None
    # Not compared: jobs of a sweep that differ in their recorded overrides only are one run.
    _values: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parses plain values, which :func:`sparsepipe.config.check.check` has accepted.

        Raises:
            ConfigError: a key is missing, as in the files of some earlier versions.
        """
        kept = copy.deepcopy(dict(values))
        parsed = _parsed(_Schema, kept)
        known = {entry.name for entry in fields(cls)}
        parsed = {name: value for name, value in parsed.items() if name in known}
        parsed["tags"] = tuple(map(str, parsed.get("tags") or ()))
        return cls(**parsed, _values=kept)

    def to_dict(self) -> dict[str, Any]:
        """The plain values, nested as in the configuration files."""
        return copy.deepcopy(dict(self._values))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the ``config.yaml`` of a run's directory.

        Raises:
            ConfigError: there is none, or it lacks keys that this version needs.
        """
        remedy = "give the directory of a run, whose config.yaml is as the run has written it"
        with reading.explained(path, "configuration of a run", error=ConfigError, remedy=remedy):
            value = read_settings(path)
            task = reading.mapping(value.get("task"), "task")
            if isinstance(command := value.get("hydra"), dict):
                command.pop(DIRECTORY, None)  # no setting
            # It may be of a run that an earlier version began.
            target = present_name(reading.name(task.get("_target_"), "task._target_"))
            try:
                return cls.from_dict(
                    {"force": False, **value, "task": {**task, "_target_": target}}
                )
            except (AttributeError, TypeError) as error:  # a value in the place of a group
                raise ValueError(str(error)) from error

    def to_yaml(self) -> str:
        """The text of ``config.yaml``: everything but ``force``, and where relative paths begin."""
        from omegaconf import OmegaConf

        settings = {key: value for key, value in self._values.items() if key != "force"}
        settings["hydra"] = {**(settings.get("hydra") or {}), DIRECTORY: os.getcwd()}
        return OmegaConf.to_yaml(OmegaConf.create(settings))

    def replace(self, changes: Mapping[str, Any] | None = None, /, **groups: Any) -> Self:
        """A copy with other values.

        Args:
            changes: values by dotted keys, such as ``{"trainer.max_epochs": 1}``; targets and
                settings of this package's own dataclasses are values as well.
            **groups: values of keys without a dot, such as ``callbacks={}``.
        """
        values = dict(self._values)
        for key, value in {**(changes or {}), **groups}.items():
            *path, last = key.split(".")
            inner = values
            for part in path:
                inner[part] = dict(inner[part])
                inner = inner[part]
            inner[last] = _plain(value)
        return type(self).from_dict(values)

    def without(self, *groups: str) -> Self:
        """A copy in which these groups build nothing, for a run that does not use them."""
        return self.replace({group: {"_target_": _UNUSED} for group in groups})

    @property
    def search(self) -> SearchChoice | None:
        """The search for a plan; None where there is none, or ``parallel.plan`` gives a plan."""
        search, plan = self.parallel.search, self.parallel.plan
        if search is None or search.search is None:
            return None
        given = plan and (plan.file, plan.config, plan.cuts)
        return None if given and any(value is not None for value in given) else search

    @property
    def plan_search(self) -> SearchChoice | None:
        """As :attr:`search`, and None where the strategy does not split the model.

        Emulated and simulated data parallelism ignore the settings of searches, so that a sweep
        over strategies may have them; trainings refuse them.
        """
        return None if self.parallel.plan is None else self.search

    @property
    def given_profiles(self) -> Mapping[str, str]:
        search = self.parallel.search
        return (search and search.profiles) or {}

    @property
    def emulation(self) -> Emulation | None:
        """How the hardware is emulated; None where it is used as it is.

        Raises:
            ConfigError: settings of an emulation are given, and ``hardware.emulate`` is not set.
        """
        given = {k: v for k, v in self.hardware.arguments.items() if k in _EMULATION_KEYS}
        found = Emulation(**given)
        if found.emulate:
            return found
        if other := [key for key in given if key != "emulate"]:
            raise ConfigError(
                f"hardware.{other[0]} is set, and hardware.emulate is not",
                remedy=f"set hardware.emulate=true, or leave hardware.{other[0]} out",
            )
        return None

    @property
    def inventory_target(self) -> Target:
        """The target of the inventory: ``hardware`` without the settings of an emulation."""
        arguments = {k: v for k, v in self.hardware.arguments.items() if k not in _EMULATION_KEYS}
        return Target(self.hardware.path, arguments)

    @property
    def recompute_memory(self) -> dict[str, Any]:
        """Settings of ``parallel.search`` on memory, which count for recomputation as well."""
        search = self._values["parallel"].get("search") or {}
        return {key: search[key] for key in ("optimizer_bytes", "reserved_bytes") if key in search}

    def identity(self) -> dict[str, Any]:
        """The values by dotted keys, without those that do not change what the run computes.

        The task leaves out further keys as its ``not_identity``.
        """
        flat = self.flat()
        drops = (*NOT_IDENTITY, *getattr(self.task.locate(), "not_identity", ()))
        flat["task._target_"] = identity_name(flat["task._target_"])
        return {
            key: value
            for key, value in flat.items()
            if not any(key == drop or key.startswith(f"{drop}.") for drop in drops)
            and not (key in _ADDED and _ADDED[key] == value)
        }

    def flat(self) -> dict[str, Any]:
        return flatten(self._values)


def read_settings(path: Path) -> dict[str, Any]:
    """The plain values of a ``config.yaml``.

    Raises:
        OSError: the file cannot be read, or is no regular one.
        ValueError: it is no YAML, or no mapping.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text = reading.read_text(path, limit_bytes=SETTINGS_BYTES)
    reading.parse_yaml(text)  # its errors have a place, and it knows how deep a text may be
    try:
        value = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    found = reading.mapping(value, "the whole")
    return {str(key): item for key, item in found.items()}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def _parsed(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a schema's dataclass; keys that it does not know are left out."""
    hints = typing.get_type_hints(schema)
    found = {}
    for entry in fields(schema):
        if entry.name not in values:
            if entry.default is MISSING and entry.default_factory is MISSING:
                raise ConfigError(
                    f"the configuration has no '{entry.name}'",
                    remedy="it may be of another version of sparsepipe: compose it anew with the "
                    "overrides of the run",
                )
            continue
        value, node = values[entry.name], entry.metadata.get("node")
        if isinstance(node, NodeMap):
            value = {name: Target.parse(item) for name, item in (value or {}).items()}
        elif node is not None:
            value = None if value is None else Target.parse(value)
        elif value is not None and (inner := dataclass_in(hints[entry.name])):
            if value.get("_target_") == _UNUSED:
                value = {each.name: None for each in fields(inner)}
            value = inner(**_parsed(inner, value))
        found[entry.name] = value
    return found


def _plain(value: Any) -> Any:
    """A value as a configuration file has it."""
    if isinstance(value, Target):
        return value.to_dict()
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
