"""The two ways to ask for an emulated cluster, made one.

``task=emulate`` says as a task what ``task=train hardware.emulate=true`` says of the hardware, so
that one key of a sweep can choose between simulating and emulating. Both are the same run.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparsepipe.config.check import describe, fits
from sparsepipe.config.emulation import emulation_of, limit_of
from sparsepipe.config.schema import Emulation
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.emulated import train_emulated

_KEYS = tuple(entry.name for entry in fields(Emulation) if entry.name != "emulate")
_TARGET = f"{train_emulated.__module__}.{train_emulated.__name__}"


def as_emulated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration as ``train_emulated`` runs it, where the hardware is emulated.

    Args:
        config: resolved and checked; one that has been through here stays as it is.

    Raises:
        ConfigError: another task is to run, a launcher has started this process, or settings
            contradict one another.
    """
    name = str(config["task"]["_target_"])
    if name == _TARGET:
        config = _asked_of_hardware(config)
    emulation = emulation_of(config)
    if emulation is None:
        return config
    if name != _TARGET and name.rpartition(".")[2] != "train":
        raise ConfigError(
            f"hardware.emulate=true with task={name.rpartition('.')[2]}",
            remedy="choose task=emulate or task=train, which is what can be emulated",
        )
    if process_group.started_externally():
        raise ConfigError(
            "an emulated cluster under torchrun",
            remedy="start the command without it: one process starts the ranks of all hosts",
        )
    found = {"time_scale": emulation.time_scale, "network": emulation.network}
    task: dict[str, Any] = {"_target_": _TARGET, **found}
    if (minibatches := _minibatches(config)) is not None:
        task["minibatches"] = minibatches
    return {**config, "task": task, "hardware": {**config["hardware"], **found}}


def _asked_of_hardware(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of ``task=emulate`` with ``hardware`` saying what the task says.

    What the task leaves out is as ``hardware`` says.

    Raises:
        ConfigError: a value cannot be, or ``hardware`` says another one.
    """
    task, hardware = config["task"], config["hardware"]
    if hardware.get("emulate") is False:
        raise ConfigError(
            "hardware.emulate=false with task=emulate",
            remedy="leave hardware.emulate out, or choose task=train",
        )
    kinds = typing.get_type_hints(Emulation, include_extras=True)
    said = {key: task[key] for key in _KEYS if task.get(key) is not None}
    for key, value in said.items():
        if not fits(value, kinds[key]):
            raise ConfigError(
                f"'task.{key}' must be {describe(kinds[key])}, not {value!r}",
                remedy=f"correct task.{key}, or leave it out",
            )
        if hardware.get(key, value) != value:
            raise ConfigError(
                f"hardware.{key}={hardware[key]}, and task.{key}={value}",
                remedy=f"set task.{key}={hardware[key]} and leave hardware.{key} out, or choose "
                "task=train hardware.emulate=true",
            )
    return {**config, "hardware": {**hardware, **said, "emulate": True}}


def _minibatches(config: Mapping[str, Any]) -> int | None:
    """What ``task.minibatches`` says.

    Raises:
        ConfigError: there are none, or the trainer has a number of its own.
    """
    asked: int | None = config["task"].get("minibatches")
    if asked is None:
        return None
    if asked < 1:
        raise ConfigError(f"task.minibatches={asked} is too little", remedy="set it to 1 or more")
    if (limit := limit_of(config["trainer"])) is not None:
        raise ConfigError(
            f"task.minibatches={asked}, and trainer.limit_train_batches={limit}",
            remedy="set one of them: task.minibatches counts those of all ranks that read, "
            "trainer.limit_train_batches those of each",
        )
    return asked
