"""The base class of all tasks, and the run that a task works on."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.callbacks import (
    BusyTimes,
    EpochLines,
    EpochSums,
    ErrorNotes,
    ShapesProgressBar,
    Throughput,
)
from sparsepipe.cluster import Inventory, Place
from sparsepipe.config.build import ready_data
from sparsepipe.config.division import Division, division_of
from sparsepipe.config.recomputation import recompute_argument
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.planning.devices import are_there, beside, cuda_devices, places_of_ranks
from sparsepipe.runs.checkpoints import DirectCheckpointIO, find_checkpoint
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import RankEnvironment, SlowedDeviceStrategy, check_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one task, as a rank sees it."""

    spec: RunSpec
    directory: RunDir
    inventory: Inventory
    watch: SignalWatch
    throughput: Throughput = field(default_factory=Throughput)
    busy: BusyTimes = field(default_factory=BusyTimes)

    @property
    def task_name(self) -> str:
        return task_class(self.spec).name

    @property
    def ranks(self) -> int:
        """Number of ranks over all nodes."""
        return num_ranks(self.spec, self.inventory)

    def assert_one_rank(self) -> None:
        """Raises a ConfigError where the run has several ranks."""
        if self.ranks > 1:
            raise ConfigError(
                f"{self.task_name} runs as one process, the configuration sets {self.ranks}",
                remedy="choose parallel=single; devices to plan for are those of hardware",
            )

    def trainer(
        self, callbacks: Sequence[pl.Callback], *, silent: bool = False, **instead: Any
    ) -> pl.Trainer:
        """A Lightning Trainer as configured."""
        arguments = {**self.spec.trainer.built(), **instead}
        places = self.places
        cuda = self.inventory.accelerator == "cuda"
        if silent:
            arguments["enable_progress_bar"] = False
        rates = [] if silent else [self.throughput]
        arguments["enable_progress_bar"], shown = self._progress(arguments)
        more = [target.build() for target in self.spec.callbacks.values()]
        arguments.update(
            accelerator="gpu" if cuda else "cpu",
            **self._devices(places),
            strategy=self._strategy(places[process_group.rank()].slowdown),
            logger=not silent and (self.loggers() or False),
            callbacks=[ErrorNotes(), EpochSums(), *rates, self.busy, *more, *shown, *callbacks],
            default_root_dir=str(self.directory.path),
            use_distributed_sampler=False,
        )
        try:
            trainer = pl.Trainer(**arguments)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ConfigError(
                f"Lightning refuses the settings of trainer: {error}",
                remedy="correct the key it names; `sparsepipe --cfg job` prints them all",
            ) from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the default
            trainer.strategy.checkpoint_io = DirectCheckpointIO()
        return trainer

    def _devices(self, places: Sequence[Place]) -> dict[str, Any]:
        """Devices as Lightning's Trainer takes them."""
        if self.spec.emulation is not None:  # all hosts are this machine
            return {"num_nodes": 1, "devices": self.ranks}
        nodes = self.spec.parallel.num_nodes
        where: dict[str, Any] = {
            "inventory": self.inventory,
            "rank": process_group.rank(),
            "nodes": nodes,
        }
        cuda = self.inventory.accelerator == "cuda"
        found = cuda_devices(places, **where) if cuda else len(beside(places, **where))
        return {"num_nodes": nodes, "devices": found}

    @property
    def places(self) -> tuple[Place, ...]:
        kept = self.directory.plan
        return places_of_ranks(self.spec, self.inventory, ranks=self.ranks, kept=kept)

    @property
    def division(self) -> Division | None:
        return division_of(self.spec, kept=self.directory.plan)

    def _strategy(self, slowdown: float) -> Any:
        target = self.spec.parallel.strategy
        if target is None:
            return "auto" if slowdown == 1 else SlowedDeviceStrategy(slowdown=slowdown)
        given: dict[str, Any] = {}
        if (division := self.division) is not None:
            recompute = recompute_argument(self.spec.parallel, division.details)
            given = {**division.arguments(), **recompute}
        if slowdown != 1:
            given["slowdown"] = slowdown
        return target.replace(**given).build_with(cluster_environment=RankEnvironment())

    def loggers(self) -> list[Any]:
        """New loggers, as configured."""
        return [
            target.build_with(
                run_id=self._tracking_id,
                run_dir=self.directory.path,
                job_type=self.task_name,
            )
            for target in self.spec.logger.values()
        ]

    @property
    def _tracking_id(self) -> str:
        """The run's identity elsewhere: unlike the directory's, it is not used twice."""
        attempt = self.directory.attempt
        again = f"-{attempt + 1}" if attempt else ""
        return f"{self.directory.path.parent.name}-{self.directory.run_id}{again}"

    def _progress(self, arguments: Mapping[str, Any]) -> tuple[bool, list[pl.Callback]]:
        if arguments["enable_progress_bar"] is False:
            return False, []
        if sys.stdout.isatty():
            return True, [ShapesProgressBar(self.throughput), EpochLines()]
        return False, [EpochLines()]


class Task(ABC):
    """Base of tasks: ``task._target_`` names a subclass that takes the other keys of ``task``.

    A subclass needs :meth:`run` only. The other methods are called before ranks exist, by the
    process that the user started.

    Attributes:
        name: what results call the task: the name of the class with underscores.
        alone: it runs as one process, so that ``parallel`` has no plan to search for.
        cores: that a sweep gives it; None: what its ranks need.
        whole_machine: it measures the machine, so that a sweep lets it see all devices.
        chooses_devices: :meth:`configured` sets ``parallel.devices`` to the number of ranks.
        reads_input: it reads the files that ``input`` names.
        on_batches: it computes on batches of the data, so that smaller ones need less memory.
        not_identity: keys of the configuration that do not change what it does; ``threads`` among
            them: nor does the number of threads.
    """

    __slots__ = ()
    name: ClassVar[str] = "task"
    alone: ClassVar[bool] = False
    cores: ClassVar[int | None] = None
    whole_machine: ClassVar[bool] = False
    chooses_devices: ClassVar[bool] = False
    on_batches: ClassVar[bool] = False
    reads_input: ClassVar[bool] = False
    not_identity: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def run(self, run: Run) -> None:
        """Does the work, on every rank, and leaves ``result.json``.

        Raises:
            SparsePipeError: something a user can mend.
            Stopped: a signal ended it.
        """

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """The configuration as the task runs it on this hardware."""
        del inventory
        return spec

    def num_ranks(self, spec: RunSpec, inventory: Inventory) -> int:
        """Processes that it runs as, over all nodes.

        Raises:
            ConfigError: no whole number of them for each node, or not as many as the plan is for.
            HardwareError: more than the inventory has.
        """
        if self.chooses_devices:
            return int(spec.parallel.devices)
        return _ranks_by_parallel(spec, inventory)

    def processes(self, spec: RunSpec, inventory: Inventory) -> int:
        """Processes among which the cores of a host are divided."""
        return self.num_ranks(spec, inventory)

    def prepare(self, spec: RunSpec, inventory: Inventory) -> str:
        """Makes ready what the task reads; a fingerprint of that, for the run's identity.

        Raises:
            SparsePipeError: a setting or the data cannot be used.
        """
        del inventory
        return ready_data(spec)

    def log_finished(self, directory: RunDir) -> None:
        """Logs results of a run that was finished before, if the command is there to show these."""
        del directory

    def hardware(self, inventory: Inventory) -> Inventory:
        """The part of the hardware that the results depend on, for the run's identity."""
        return inventory

    def checkpoint(self, spec: RunSpec) -> Path | None:
        """The checkpoint that it starts from; None: it starts from none.

        Raises:
            CheckpointError: there is no such file.
        """
        if spec.checkpoint is None:
            return None
        return find_checkpoint(spec.checkpoint, outputs=spec.paths.outputs)

    def adopt_plan(self, spec: RunSpec, inventory: Inventory, directory: RunDir) -> None:
        """Writes the run's plan where the task takes it from elsewhere than from a search."""
        del spec, inventory, directory


def task_class(spec: RunSpec) -> type[Task]:
    """The class that ``task._target_`` names. Raises a ConfigError where it is no task."""
    found = spec.task.locate()
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(
            f"task._target_={spec.task.path} is no task",
            remedy="name a subclass of sparsepipe.tasks.task.Task, as docs/extending.md shows",
        )
    return found


def task_of(spec: RunSpec) -> Task:
    """The task of a configuration, with its settings; raises as :func:`task_class`."""
    return task_class(spec)(**spec.task.arguments)


def num_ranks(spec: RunSpec, inventory: Inventory) -> int:
    """Processes of a run, see :meth:`Task.num_ranks`."""
    return task_of(spec).num_ranks(spec, inventory)


def _ranks_by_parallel(spec: RunSpec, inventory: Inventory) -> int:
    """Number of ranks by ``parallel``, over all nodes."""
    parallel = spec.parallel
    division = division_of(spec)
    if spec.search is not None:
        return _searched_devices(spec, inventory)
    planned = None if division is None else division.num_ranks
    nodes, devices = parallel.num_nodes, parallel.devices
    if nodes > 1 and planned and devices in ("auto", planned) and are_there(division, inventory):
        return planned  # which may lie unevenly on the hosts
    if devices == "auto" and nodes >= 1:
        devices = planned or nodes * inventory.devices_per_host(nodes)
    if not isinstance(devices, int) or devices < 1 or nodes < 1 or devices % nodes:
        by_plan = "" if planned is None else f", {planned} by parallel.plan,"
        raise ConfigError(
            f"parallel.devices={parallel.devices}{by_plan} on parallel.num_nodes={nodes} is not "
            "possible",
            remedy="set devices to 'auto' or to a multiple of num_nodes, at least 1 for each",
        )
    if planned not in (None, devices):
        raise PlanError(
            f"parallel.plan is for {planned} devices, parallel.devices={devices}",
            remedy=f"set parallel.devices=auto, or a plan for {devices}",
        )
    try:
        inventory.require(devices // nodes, num_hosts=nodes)
    except HardwareError as error:
        if planned is None:
            raise
        raise HardwareError(
            f"parallel.plan is for {planned} devices: {error.message}",
            remedy="give parallel.plan fewer devices, or choose another hardware; "
            f"hardware.cpu_devices={planned} lets processes share the cores of a CPU",
        ) from error
    if parallel.grid is not None and parallel.roles is None:
        check_grid(parallel.grid, replicas=parallel.replicas, ranks=devices)
    if parallel.strategy is None and devices > 1:
        raise ConfigError(
            f"{devices} devices (parallel.devices={parallel.devices}) without a strategy",
            remedy="choose parallel=dp, or parallel.devices=1",
        )
    return devices


def _searched_devices(spec: RunSpec, inventory: Inventory) -> int:
    """Number of ranks of a run whose plan is searched for: one for each device."""
    if spec.parallel.plan is None:
        raise ConfigError(
            "parallel.search is set where no model is split",
            remedy="choose parallel=hete_mp, mp or exact, or leave parallel.search out",
        )
    devices, nodes = spec.parallel.devices, spec.parallel.num_nodes
    hosts = inventory.hosts
    if len(hosts) != nodes:
        remedy = (
            f"start the command on each host by torchrun, with parallel.num_nodes={len(hosts)}"
            if len(hosts) > 1
            else "list all hosts in a hardware inventory, or set parallel.num_nodes=1"
        )
        raise ConfigError(
            f"the plan is searched for the {len(hosts)} hosts of the inventory "
            f"({', '.join(host.name for host in hosts)}), and parallel.num_nodes={nodes}",
            remedy=f"{remedy}; or choose another hardware",
        )
    if devices not in ("auto", inventory.num_devices):
        raise ConfigError(
            f"parallel.devices={devices}, and the plan is searched for all "
            f"{inventory.num_devices} devices of the inventory",
            remedy="set parallel.devices=auto and choose a hardware with the devices to use "
            "(hardware.cpu_devices for a CPU), or give a plan as parallel.plan",
        )
    return inventory.num_devices
