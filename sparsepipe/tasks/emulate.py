"""The training on an emulated cluster: ``task=train hardware.emulate=true`` or ``task=emulate``.

Strategies, schedules, messages and gradient averages are those of any training. Model and data are
made from the profiles of the inventory's devices, which say how long layers take, how much they
send and how many parameters they have. All ranks run on this machine.
"""

from __future__ import annotations

import logging
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsepipe.callbacks import StepTimer, StopOnSignal
from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import named_places
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Emulation
from sparsepipe.config.target import Target
from sparsepipe.emulate import emulated_layout, set_limits
from sparsepipe.emulate.replay import ReplayPace
from sparsepipe.emulate.training import ReplayData, ReplayModule
from sparsepipe.errors import ConfigError, ProfileError
from sparsepipe.planning.device_profiles import (
    check_batch_sizes,
    fingerprint_of_profiles,
    load_profiles,
)
from sparsepipe.planning.division import division_of
from sparsepipe.profiling import Profile
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.result import kept_values, plan_values, write_result
from sparsepipe.tasks.task import ResolvedRun, Task, task_of
from sparsepipe.tasks.train import Train
from sparsepipe.utils.arguments import wrong_value

log = logging.getLogger(__name__)

_MINIBATCHES = 24
"""Minibatches of each rank that reads data, unless the configuration sets their number."""
_MOMENTUM = 0.9
"""Momentum with which SpecTrain predicts weights; any value does, since all weights are zero."""
_INSTEAD: Mapping[str, Any] = {
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "precision": "32-true",
    "gradient_clip_val": None,
    "accumulate_grad_batches": 1,
    "overfit_batches": 0.0,
    "sync_batchnorm": False,
}
"""Trainer arguments in place of the configured ones: one epoch, no validation, no checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEmulated(Task):
    """Trains one epoch on an emulated cluster, and writes the training speed.

    ``conf/task/emulate.yaml`` describes the settings.
    """

    chooses_devices: ClassVar[bool] = True

    time_scale: float | None = None
    network: Literal["auto", "namespaces", "loopback"] | None = None
    minibatches: Annotated[int, Field(ge=1)] | None = None
    link_bytes_per_s: float | None = None

    def run(self, run: ResolvedRun) -> None:
        """Trains one epoch of emulated layers; ``result.json`` has the minibatches per second."""
        emulation, division, parallel = run.spec.emulation, run.division, run.spec.parallel
        assert emulation is not None
        of_devices = emulated_profiles(run.spec, run.inventory)
        profiles = [of_devices[place.name] for place in run.places]
        rank = process_group.rank()
        profile = profiles[rank]
        rows: int | None = None  # samples of a minibatch, if it is cut into microbatches
        if parallel.synchronous is not None:
            rows = int(profile.meta.get("batch_size") or parallel.synchronous.microbatches)
        module = ReplayModule(
            profile,
            ReplayPace(emulation.time_scale),
            momentum=_MOMENTUM if parallel.argument("mode") == "spectrain" else 0.0,
            updates=all(each.update_s is not None for each in profiles),
            rows=rows,
        )
        if division is not None:
            division.check(num_layers=profile.num_layers)
        timer = StepTimer(emulation.time_scale)
        callbacks = [run.keep_plan(), timer, StopOnSignal(run.watch, None)]
        trainer = run.trainer(callbacks, silent=True, **_INSTEAD)
        if rank == 0:
            set_limits(lifted=True)  # before any rank sends
        minibatches = minibatches_per_reader(run, self.minibatches)
        trainer.fit(module, datamodule=ReplayData(profile, minibatches=minibatches, rows=rows))
        found, plan, link = timer.rates(), plan_values(run, trainer), run.inventory.link
        plan.pop("plan_shapes_per_s", None)  # counts batches of the data, not of the profile
        values: dict[str, Any] = {
            "kind": "emulated",
            "network": "loopback" if emulated_layout() is None else "namespaces",
            "time_scale": emulation.time_scale,
            "link_bytes_per_s": None if link is None else link.bytes_per_s,
            "minibatches": found.minibatches,
            "minibatches_per_s": found.steady_per_s,
            "steady_steps": found.steady_steps,
            "epoch_minibatches_per_s": found.epoch_per_s,
            "epoch_s": found.epoch_s,
            **plan,
        }
        if (size := profile.meta.get("batch_size")) is not None:
            values["samples_per_s"] = size * found.steady_per_s
            values["epoch_samples_per_s"] = size * found.epoch_per_s
            if "plan_bottleneck_s" in values:
                values["plan_samples_per_s"] = size / values["plan_bottleneck_s"]
        write_result(run, {**values, **kept_values(run)})
        if rank == 0:
            log.info(
                "emulated: %.4g minibatches/s in the steady part, %.4g with filling and draining "
                "(time_scale %g, network: %s)",
                values["minibatches_per_s"],
                values["epoch_minibatches_per_s"],
                values["time_scale"],
                values["network"],
            )

    def prepare(self, run: ResolvedRun) -> str:
        """Returns a fingerprint of the profiles, from which data and model are made."""
        profiles = emulated_profiles(run.spec, run.inventory)
        if run.division is not None:
            run.division.check(num_layers=next(iter(profiles.values())).num_layers)
        return fingerprint_of_profiles(profiles)

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """Returns the configuration with a rank per device of the plan, else of the inventory."""
        given, division = spec.parallel, division_of(spec)
        chosen = named_places(inventory, (division and division.devices) or ())
        ranks, hosts = inventory.num_devices, [host.name for host in inventory.hosts]
        if given.devices == 1:
            ranks, hosts = 1, hosts[:1]
        elif chosen is not None and spec.search is None:
            ranks, hosts = len(chosen), sorted({place.host for place in chosen})
        planned = None if division is None else division.num_ranks
        if given.devices not in ("auto", ranks) or planned not in (None, ranks):
            what = f"plan is for {planned} device{'s' * (planned != 1)}"
            what = f"devices={given.devices}" if planned is None else what
            raise ConfigError(
                f"parallel.{what}, but the number of emulated devices is {ranks}",
                remedy="set parallel.devices=auto, give a plan for all devices or one that names "
                "those it uses, or choose hardware with as many devices",
            )
        if given.strategy is None and ranks > 1:
            raise ConfigError(
                f"the emulated cluster has {ranks} devices, but no strategy is set",
                remedy="choose parallel=dp, mp or hete_mp",
            )
        shares = division is not None and division.cuts is None and division.balance == "flops"
        if shares and ranks > 1 and spec.search is None:
            raise ConfigError(
                "parallel.plan.balance=flops needs the FLOPs of layers, which profiles do not have",
                remedy="choose parallel=hete_mp, give parallel.plan.cuts, or set "
                "parallel.plan.balance=parameters",
            )
        on_processors = {"process_group_backend": "gloo", "direct": False, "layers": None}
        strategy = given.strategy
        if strategy is not None:
            known = {key: on_processors[key] for key in on_processors if key in strategy.arguments}
            strategy = strategy.replace(**known)
        return spec.replace(
            {
                "parallel.devices": ranks,
                "parallel.num_nodes": len(hosts),
                "parallel.strategy": strategy,
            }
        )


def emulated_profiles(spec: RunSpec, inventory: Inventory) -> dict[str, Profile]:
    """Returns the profiles of the inventory's devices, by the devices' names."""
    model, given, settings = spec.model.name, spec.given_profiles, spec.model.settings
    profiles = load_profiles(inventory, model, given=given, settings=settings)
    names = dict.fromkeys(d.name for host in inventory.hosts for d in host.devices)
    if missing := [name for name in names if name not in profiles]:
        raise ProfileError(
            f"there is no profile of {model} on {', '.join(missing)}, but devices are emulated "
            "from their profiles",
            remedy=f"add profile: {{{model}: FILE}} to each of these devices in the hardware "
            "inventory, or choose the model that was profiled there",
        )
    sizes = {
        name: [layer.parameter_bytes for layer in profile.layers]
        for name, profile in profiles.items()
    }
    first, *others = sizes
    if unlike := [name for name in others if sizes[name] != sizes[first]]:
        raise ProfileError(
            f"the profiles of {first} and {unlike[0]} are of models with different parameters",
            remedy="profile one model on all devices (task=profile)",
        )
    check_batch_sizes(profiles)
    return profiles


def minibatches_per_reader(run: ResolvedRun, minibatches: int | None) -> int:
    """Returns the number of minibatches for each rank that reads data: all ranks with data
    parallelism, else those of the first stage. ``minibatches``: the number for all these ranks
    together; None: ``limit_train_batches`` for each, or else 24.
    """
    if minibatches is None:
        return run.spec.trainer.batches_limit or _MINIBATCHES
    division, readers = run.division, run.ranks
    if division is not None:
        readers = 1 if division.config is None else int(division.config.partition("-")[0])
    return math.ceil(minibatches / readers)


_KEYS = tuple(entry.name for entry in fields(Emulation) if entry.name != "emulate")
_TARGET = f"{TrainEmulated.__module__}.{TrainEmulated.__name__}"


def as_emulated(spec: RunSpec) -> RunSpec:
    """Returns the configuration, with the task ``TrainEmulated`` if the hardware is emulated."""
    task = type(task_of(spec))
    if task is TrainEmulated:  # whose settings belong to the hardware
        own, hardware = spec.task, spec.hardware
        kinds = typing.get_type_hints(Emulation, include_extras=True)
        given = {key: own.get(key) for key in _KEYS if own.get(key) is not None} | {"emulate": True}
        for key, value in given.items():
            if (wrong := wrong_value(value, kinds[key])) is not None:
                raise ConfigError(
                    f"'task.{key}' {wrong}, not {value!r}",
                    remedy=f"correct task.{key}, or leave it out",
                )
            if hardware.get(key, value) != value:
                raise ConfigError(
                    f"hardware.{key}={hardware.get(key)}, but task=emulate sets it to {value}",
                    remedy=f"leave hardware.{key} out, or choose task=train hardware.emulate=true",
                )
        spec = spec.replace(hardware=hardware.replace(**given))
    emulation = spec.emulation
    if emulation is None:
        return spec
    if task not in (TrainEmulated, Train):
        raise ConfigError(
            f"hardware.emulate=true, but task={task.name} cannot be emulated",
            remedy="choose task=emulate or task=train, or leave hardware.emulate out",
        )
    if process_group.started_externally():
        raise ConfigError(
            "an emulated cluster cannot run under torchrun",
            remedy="start the command without it: one process starts the ranks of all hosts",
        )
    found = {"time_scale": emulation.time_scale, "network": emulation.network}
    target = Target(_TARGET, found)
    if (minibatches := spec.task.get("minibatches")) is not None:
        if (limit := spec.trainer.batches_limit) is not None:
            raise ConfigError(
                f"task.minibatches={minibatches} and trainer.limit_train_batches={limit} are set, "
                "but only one of them may be",
                remedy="set task.minibatches for the minibatches of all ranks that read, or "
                "trainer.limit_train_batches for those of each",
            )
        target = target.replace(minibatches=minibatches)
    return spec.replace(task=target, hardware=spec.hardware.replace(**found))
