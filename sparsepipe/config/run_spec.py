"""The configuration of one run, parsed once and passed on: ``RunSpec``."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from sparsepipe.config.schema import Config, Emulation, Optim, SearchChoice, TrainerArguments
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError
from sparsepipe.utils import reading

_NAMES = tuple(entry.name for entry in fields(Config))
_GROUPS = {"optim": Optim, "trainer": TrainerArguments}
_EMULATION_KEYS = tuple(entry.name for entry in fields(Emulation))

DIRECTORY = "directory"
"""Key below ``hydra``: the run's working directory, from which its relative paths start."""
_UNUSED = "none"
"""``_target_`` of a group that a run does not use."""
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
"""Keys left out of identities: they do not change what a run computes, or the identity contains a
fingerprint, the number of ranks, the plan or the search instead."""
_LEFT_OUT_AT: Mapping[str, Any] = {
    "checkpoint_strict": True,
    "data.balance": 0.5,
    "data.batches_per_epoch": None,
    "data.patch": None,
    "data.patches_per_volume": 4,
    "data.source.channels": [],
    "data.source.fill": None,
    "data.source.ignore": None,
    "data.source.intensity": None,
    "data.source.orientation": None,
    "data.source.spacing": None,
    "input": None,
    "loss.class_weights": None,
    "loss.dice": 0.0,
    "loss.lovasz": 0.0,
    "model.deep_supervision": False,
    "task.block_voxels": 500_000,
    "task.flips": False,
    "task.overlap": 0.5,
    "task.probabilities": False,
    "task.test_weights": "best",
    "trainer.matmul_precision": None,
    "trainer.nonfinite": "stop",
}
"""Keys that identities leave out where they have these values."""
_NAMES_IN_IDENTITY = {
    "sparsepipe.paper.report_task.Report": "sparsepipe.experiment.report_task.report",
    "sparsepipe.paper.table1.Table1": "sparsepipe.experiment.table1.table1",
    "sparsepipe.paper.table3.Table3": "sparsepipe.experiment.table3.table3",
    "sparsepipe.tasks.bandwidth.Bandwidth": "sparsepipe.experiment.bandwidth.bandwidth",
    "sparsepipe.tasks.emulate.TrainEmulated": "sparsepipe.experiment.emulated.train_emulated",
    "sparsepipe.tasks.evaluate.Evaluate": "sparsepipe.experiment.evaluate.evaluate",
    "sparsepipe.tasks.fitting.fit_batch.FitBatch": (
        "sparsepipe.experiment.fitting.fit_batch.fit_batch"
    ),
    "sparsepipe.tasks.fitting.train_if_fits.TrainIfFits": (
        "sparsepipe.experiment.fitting.train_if_fits.train_if_fits"
    ),
    "sparsepipe.tasks.partition.Partition": "sparsepipe.experiment.partition.partition",
    "sparsepipe.tasks.profile.ProfileLayers": "sparsepipe.experiment.profile.profile",
    "sparsepipe.tasks.simulate.Simulate": "sparsepipe.experiment.simulate.simulate",
    "sparsepipe.tasks.train.Train": "sparsepipe.experiment.train.train",
    "sparsepipe.sparse.AutoBackend": "sparsepipe.sparse.NativeBackend",
}
"""Targets under another name in identities: tasks have moved to other modules, and on a CPU the
automatic backend is the native one, which was the default before.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(Config):
    """A resolved and checked configuration.

    Made by :func:`sparsepipe.config.compose.resolve` or read from a run's directory; a changed copy
    is made by :meth:`replace`. The attributes are the groups and keys of the configuration; the
    plain values that they were parsed from are kept, so that files and identities have exactly the
    keys that were given. Under ``hydra`` these contain the overrides and choices of the command.
    """

    # Not compared: jobs of a sweep that differ only in their recorded overrides are one run.
    _values: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parses plain values that :func:`sparsepipe.config.check.check` has accepted."""
        kept = copy.deepcopy(dict(values))
        parsed: dict[str, Any] = {}
        for name, adapter in _adapters(Config).items():
            value = kept.get(name)
            if isinstance(value, Mapping) and value.get("_target_") == _UNUSED and name in _GROUPS:
                parsed[name] = _GROUPS[name](**dict.fromkeys(_GROUPS[name].__annotations__))
            elif name in kept:
                parsed[name] = adapter.validate_json(json.dumps(value))
        try:
            return cls(**parsed, _values=kept)
        except TypeError as error:
            raise ConfigError(
                f"the configuration is not complete: {error}",
                remedy="compose it anew with the overrides of the run: it may come from another "
                "version of sparsepipe",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The plain values, nested as in the configuration files."""
        return copy.deepcopy(dict(self._values))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the ``config.yaml`` of a run's directory."""
        remedy = "give the directory of a run whose config.yaml is unchanged"
        with reading.explained(path, "configuration of a run", error=ConfigError, remedy=remedy):
            value = read_settings(path)
            if isinstance(command := value.get("hydra"), dict):
                command.pop(DIRECTORY, None)  # not a setting
            return cls.from_dict({"force": False, **value})

    def to_yaml(self) -> str:
        """The text of ``config.yaml``: all values but ``force``, plus the working directory."""
        from omegaconf import OmegaConf

        settings = {key: value for key, value in self._values.items() if key != "force"}
        settings["hydra"] = {**(settings.get("hydra") or {}), DIRECTORY: os.getcwd()}
        return OmegaConf.to_yaml(OmegaConf.create(settings))

    def replace(self, changes: Mapping[str, Any] | None = None, /, **groups: Any) -> Self:
        """Returns a copy with some values changed.

        Args:
            changes: values by dotted keys, such as ``{"trainer.max_epochs": 1}``; a value may be a
                :class:`Target` or a dataclass of the schema.
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
        """Returns a copy in which these groups build nothing, for a run that does not use them."""
        return self.replace({group: {"_target_": _UNUSED} for group in groups})

    @property
    def search(self) -> SearchChoice | None:
        """Settings of the search for a plan; None: no search, or ``parallel.plan`` gives a plan."""
        search, plan = self.parallel.search, self.parallel.plan
        if search is None or search.search is None:
            return None
        given = plan and (plan.file, plan.config, plan.cuts)
        return None if given and any(value is not None for value in given) else search

    @property
    def plan_search(self) -> SearchChoice | None:
        """Like :attr:`search`, but also None where the strategy does not split the model.

        Emulated and simulated data parallelism ignore the settings of searches, so that a sweep
        over strategies may have them; trainings refuse them.
        """
        return None if self.parallel.plan is None else self.search

    @property
    def given_profiles(self) -> Mapping[str, str]:
        """Path of each device's profile, by the device's name, as given in ``parallel.search``."""
        return (self.parallel.search and self.parallel.search.profiles) or {}

    @property
    def emulation(self) -> Emulation | None:
        """Settings of the emulation; None if the hardware is not emulated."""
        given = {k: v for k, v in self.hardware.arguments.items() if k in _EMULATION_KEYS}
        found = Emulation(**given)
        if found.emulate:
            return found
        if other := [key for key in given if key != "emulate"]:
            raise ConfigError(
                f"hardware.{other[0]} is set, but hardware.emulate is not true",
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
        """Memory settings that ``parallel.search`` gives, by name; recomputation uses them too."""
        search = self._values["parallel"].get("search") or {}
        return {key: search[key] for key in ("optimizer_bytes", "reserved_bytes") if key in search}

    def identity(self) -> dict[str, Any]:
        """Values by dotted keys, without those that do not change what the run computes.

        The ``not_identity`` of the task names further keys that are left out.
        """
        flat = flatten(self._values)
        drops = (*NOT_IDENTITY, *getattr(self.task.locate(), "not_identity", ()))
        return {
            key: _NAMES_IN_IDENTITY.get(value, value)
            if key.rpartition(".")[2] == "_target_"
            else value
            for key, value in flat.items()
            if not is_below(key, drops) and not (key in _LEFT_OUT_AT and _LEFT_OUT_AT[key] == value)
        }

    def flat(self) -> dict[str, Any]:
        return flatten(self._values)


def read_settings(path: Path) -> dict[str, Any]:
    """Reads the plain values of a ``config.yaml``; raises an OSError or ValueError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        value = OmegaConf.to_container(OmegaConf.load(io.StringIO(reading.read_text(path))))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    found = reading.mapping(value, "its content")
    return {str(key): item for key, item in found.items()}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into one mapping with dotted keys; lists stay as they are."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turns a mapping with dotted keys into nested mappings: the inverse of :func:`flatten`."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def is_below(key: str, groups: Iterable[str]) -> bool:
    """Whether a dotted key is one of ``groups`` or lies below one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


@functools.cache
def _adapters(schema: type) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(schema, include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name in _NAMES}


def _plain(value: Any) -> Any:
    """Turns targets and dataclasses, also nested ones, into plain mappings."""
    if isinstance(value, Target):
        return value.to_dict()
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
