"""The two ways to ask for an emulated cluster, made one.

``task=emulate`` says as a task what ``task=train hardware.emulate=true`` says of the hardware, so
that one key of a sweep can choose between simulating and emulating. Both are the same run.
"""

from __future__ import annotations

import typing
from dataclasses import fields

from sparsepipe.config.check import describe, fits
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Emulation
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.emulated import train_emulated

_KEYS = tuple(entry.name for entry in fields(Emulation) if entry.name != "emulate")
_TARGET = f"{train_emulated.__module__}.{train_emulated.__name__}"


def as_emulated(spec: RunSpec) -> RunSpec:
    """The configuration as ``train_emulated`` runs it, where the hardware is emulated.

    Args:
        spec: the configuration.

    Raises:
        ConfigError: another task is to run, a launcher has started this process, or settings
            contradict one another.
    """
    name = spec.task.path
    if name == _TARGET:
        spec = _with_emulated_hardware(spec)
    emulation = spec.emulation
    if emulation is None:
        return spec
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
    task = Target(_TARGET, found)
    if (minibatches := _minibatches(spec)) is not None:
        task = task.replace(minibatches=minibatches)
    return spec.replace(task=task, hardware=spec.hardware.replace(**found))


def _with_emulated_hardware(spec: RunSpec) -> RunSpec:
    """The configuration of ``task=emulate`` with ``hardware`` saying what the task says.

    What the task leaves out is as ``hardware`` says.

    Raises:
        ConfigError: a value cannot be, or ``hardware`` says another one.
    """
    task, hardware = spec.task, spec.hardware
    if hardware.get("emulate") is False:
        raise ConfigError(
            "hardware.emulate=false with task=emulate",
            remedy="leave hardware.emulate out, or choose task=train",
        )
    kinds = typing.get_type_hints(Emulation, include_extras=True)
    said = {key: task.get(key) for key in _KEYS if task.get(key) is not None}
    for key, value in said.items():
        if not fits(value, kinds[key]):
            raise ConfigError(
                f"'task.{key}' must be {describe(kinds[key])}, not {value!r}",
                remedy=f"correct task.{key}, or leave it out",
            )
        if hardware.get(key, value) != value:
            raise ConfigError(
                f"hardware.{key}={hardware.get(key)}, and task.{key}={value}",
                remedy=f"set task.{key}={hardware.get(key)} and leave hardware.{key} out, or "
                "choose task=train hardware.emulate=true",
            )
    return spec.replace(hardware=hardware.replace(**said, emulate=True))


def _minibatches(spec: RunSpec) -> int | None:
    """What ``task.minibatches`` says.

    Raises:
        ConfigError: there are none, or the trainer has a number of its own.
    """
    asked: int | None = spec.task.get("minibatches")
    if asked is None:
        return None
    if asked < 1:
        raise ConfigError(f"task.minibatches={asked} is too little", remedy="set it to 1 or more")
    if (limit := spec.trainer.batches_limit) is not None:
        raise ConfigError(
            f"task.minibatches={asked}, and trainer.limit_train_batches={limit}",
            remedy="set one of them: task.minibatches counts those of all ranks that read, "
            "trainer.limit_train_batches those of each",
        )
    return asked
