"""The base class of all tasks, and the resolved run that a task works on."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from sparsepipe.callbacks import (
    BusyTimes,
    EpochLines,
    EpochSums,
    ErrorNotes,
    KeepPlan,
    ShapesProgressBar,
    Throughput,
)
from sparsepipe.cluster import Inventory, Place
from sparsepipe.cluster.inventory import Accelerator
from sparsepipe.config.build import build_data, build_module, ready_data
from sparsepipe.config.finished_run import Training, training_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError
from sparsepipe.planning.devices import beside, cuda_devices, num_ranks, places_of_ranks
from sparsepipe.planning.division import Division, division_of, read_plan_file
from sparsepipe.planning.recomputation import recompute_of
from sparsepipe.runs.checkpoints import DirectCheckpointIO, find_checkpoint
from sparsepipe.runs.randomness import adapt_loaders
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import RankEnvironment, SlowedDeviceStrategy
from sparsepipe.strategies.pipeline.stage_plan import find_layers
from sparsepipe.utils.process import MatmulPrecision, matmul_precision_on


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """One run and everything that its configuration decides, resolved once.

    ``launch/prepare.py`` makes it, then copies that also have the directory and, later, the plan
    that a search has written there.

    Attributes:
        spec: the configuration, as the task runs it on this hardware.
        task: what the run does, with its settings.
        inventory: the hardware.
        division: how the strategy splits the model into stages; None: it does not.
        ranks: number of ranks over all nodes.
        places: the device of each rank.
        training: configuration of the training whose network the task uses, if any and known.
        found: the directory; None until the data are prepared. See :attr:`directory`.
        watch: records signals that end the run.
        throughput: callback that measures the rate of the training.
        busy: callback that measures how long this rank computes and waits.
    """

    spec: RunSpec
    task: Task
    inventory: Inventory
    division: Division | None
    ranks: int
    places: tuple[Place, ...]
    training: Training | None = None
    found: RunDir | None = None
    watch: SignalWatch = field(default_factory=SignalWatch)
    throughput: Throughput = field(default_factory=Throughput)
    busy: BusyTimes = field(default_factory=BusyTimes)

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        inventory: Inventory,
        *,
        directory: RunDir | None = None,
        watch: SignalWatch | None = None,
    ) -> Self:
        """Resolves the run of a configuration that :meth:`Task.configured` has returned.

        If ``directory`` is given and contains a plan, the run uses that plan.
        """
        task, division, source = task_of(spec), division_of(spec), spec.checkpoint
        as_trained = getattr(task, "as_trained", False) and source is not None
        chosen = task.chooses_devices
        ranks = int(spec.parallel.devices) if chosen else num_ranks(spec, inventory, division)
        made = cls(
            spec=spec,
            task=task,
            inventory=inventory,
            division=division,
            ranks=ranks,
            places=places_of_ranks(spec, inventory, division, ranks=ranks),
            training=training_of(str(source), command=spec.to_dict()) if as_trained else None,
            watch=watch or SignalWatch(),
        )
        return made if directory is None else made.in_directory(directory)

    def in_directory(self, directory: RunDir) -> Self:
        """Returns the run with its directory, and with the plan in its plan file, if any."""
        known = replace(self, found=directory)
        if self.division is None or not directory.plan.exists():
            return known
        division = read_plan_file(directory.plan, balance=self.division.balance)
        places = places_of_ranks(self.spec, self.inventory, division, ranks=self.ranks)
        return replace(known, division=division, places=places)

    @property
    def directory(self) -> RunDir:
        """The run's directory."""
        assert self.found is not None, "the data are not prepared yet"
        return self.found

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device that the task computes on; one that only plans uses a CPU."""
        return "cpu" if self.task.cores is not None else self.inventory.accelerator

    @property
    def matmul_precision(self) -> MatmulPrecision:
        """The precision of float32 products on the run's devices."""
        return matmul_precision_on(self.accelerator, self.spec.trainer.matmul_precision)

    @property
    def own_device(self) -> torch.device:
        """The torch device of this rank."""
        if self.inventory.accelerator != "cuda":
            return torch.device("cpu")
        rank, nodes = process_group.rank(), self.spec.parallel.num_nodes
        indices = cuda_devices(self.places, self.inventory, rank=rank, nodes=nodes)
        return torch.device("cuda", indices[process_group.local_rank()])

    def load_data(self, *stages: str) -> pl.LightningDataModule:
        """Returns the data, set up for ``stages`` (``fit``, ``test``). Loaders draw with generators
        of their own, apart from the training's, and their workers ignore Ctrl-C.
        """
        data = build_data(self.spec)
        for stage in stages:
            data.setup(stage)
        adapt_loaders(data, seed=int(self.spec.seed))
        return data

    def build_module(self, data: pl.LightningDataModule) -> pl.LightningModule:
        """Returns a new module; raises a PlanError if the plan does not fit its layers."""
        module = build_module(self.spec, data)
        if self.division is not None:
            name = find_layers(module, self.spec.parallel.argument("layers"))
            layers = cast(nn.Sequential, module.get_submodule(name))
            self.division.check(num_layers=len(layers))
        return module

    def trainer(
        self, callbacks: Sequence[pl.Callback], *, silent: bool = False, **instead: Any
    ) -> pl.Trainer:
        """Returns a Lightning Trainer with ``callbacks`` in addition to those of every run.

        A ``silent`` one shows no progress, has no loggers and measures no rates; ``instead``:
        arguments that replace the configured ones.
        """
        arguments = {**self.spec.trainer.built(), **instead}
        cuda = self.inventory.accelerator == "cuda"
        rates = [] if silent else [self.throughput]
        shows = not silent and arguments["enable_progress_bar"] is not False
        has_bar = shows and sys.stdout.isatty()
        bar = [ShapesProgressBar(self.throughput)] if has_bar else []
        lines = [EpochLines()] if shows else []
        more = [target.build() for target in self.spec.callbacks.values()]
        nodes = self.spec.parallel.num_nodes
        devices: int | list[int]
        if self.spec.emulation is not None:  # all hosts are this machine
            nodes, devices = 1, self.ranks
        else:
            places, inventory, rank = self.places, self.inventory, process_group.rank()
            devices = len(beside(places, inventory, rank=rank, nodes=nodes))
            if cuda:
                devices = cuda_devices(places, inventory, rank=rank, nodes=nodes)
        arguments.update(
            accelerator="gpu" if cuda else "cpu",
            num_nodes=nodes,
            devices=devices,
            strategy=self._strategy(),
            logger=not silent and (self.loggers() or False),
            enable_progress_bar=has_bar,
            callbacks=[
                *(ErrorNotes(), EpochSums(), *rates, self.busy, *more, *bar, *lines, *callbacks)
            ],
            default_root_dir=str(self.directory.path),
            use_distributed_sampler=False,
        )
        try:
            trainer = pl.Trainer(**arguments)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ConfigError(
                f"Lightning refuses the settings of trainer: {error}",
                remedy="correct the key that Lightning names; `sparsepipe --cfg job` prints all "
                "keys",
            ) from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the default
            trainer.strategy.checkpoint_io = DirectCheckpointIO()
        return trainer

    def _strategy(self) -> Any:
        parallel, slowdown = self.spec.parallel, self.places[process_group.rank()].slowdown
        if parallel.strategy is None:
            return "auto" if slowdown == 1 else SlowedDeviceStrategy(slowdown=slowdown)
        given: dict[str, Any] = {} if self.division is None else self.division.arguments()
        if (recompute := recompute_of(parallel, self.division)) != parallel.recompute:
            given["recompute"] = recompute
        if slowdown != 1:
            given["slowdown"] = slowdown
        return parallel.strategy.replace(**given).build_with(cluster_environment=RankEnvironment())

    def keep_plan(self) -> KeepPlan:
        """Returns a new callback that writes a pipeline's plan to the run's directory."""
        details = {} if self.division is None else self.division.details
        return KeepPlan(self.directory, [place.text for place in self.places], details)

    def loggers(self) -> list[Any]:
        """Returns new loggers, as configured.

        A run started anew with ``force`` has another id at trackers, but the same directory.
        """
        directory = self.directory
        again = f"-{directory.attempt + 1}" if directory.attempt else ""
        return [
            target.build_with(
                run_id=f"{directory.path.parent.name}-{directory.run_id}{again}",
                run_dir=directory.path,
                job_type=self.task.name,
            )
            for target in self.spec.logger.values()
        ]


class Task(ABC):
    """Base class of tasks; ``task._target_`` names a subclass, the other keys are its arguments.

    A subclass must define :meth:`run` only. The other methods are called before ranks run, by the
    processes that the user or torchrun started.

    Attributes:
        name: the task's name in results; by default, the class name in snake case.
        alone: whether the task runs as one process, so no plan is searched for.
        cores: number of cores that a sweep gives the task; None: as many as its ranks need.
        chooses_devices: whether :meth:`configured` sets ``parallel.devices`` to the number of
            ranks; a sweep lets such a task see all devices of the machine.
        not_identity: keys of the configuration that do not affect the results; ``threads`` stands
            for the number of threads.
    """

    __slots__ = ()
    name: ClassVar[str] = "task"
    alone: ClassVar[bool] = False
    cores: ClassVar[int | None] = None
    chooses_devices: ClassVar[bool] = False
    not_identity: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def run(self, run: ResolvedRun) -> None:
        """Does the work on every rank, and writes ``result.json``.

        Raises:
            SparsePipeError: something failed that the user can correct.
            Stopped: a signal ended the run.
        """

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """Returns the configuration as the task runs it on this hardware."""
        del inventory
        return spec

    def processes(self, run: ResolvedRun) -> int:
        """Returns the number of processes among which the cores of a host are divided."""
        return run.ranks

    def prepare(self, run: ResolvedRun) -> str:
        """Prepares what the task reads; returns its fingerprint for the run's identity."""
        return ready_data(run.spec)

    def hardware(self, inventory: Inventory) -> Inventory:
        """Returns the part of the hardware that affects the results, for the run's identity."""
        return inventory

    def checkpoint(self, spec: RunSpec) -> Path | None:
        """Returns the checkpoint file that the task starts from, if any."""
        if spec.checkpoint is None:
            return None
        return find_checkpoint(spec.checkpoint, outputs=spec.paths.outputs)

    def adopt_plan(self, run: ResolvedRun) -> None:
        """Writes a plan to the run's directory if the task has one without a search."""
        del run


def task_of(spec: RunSpec) -> Task:
    """Returns the task of a configuration, with its settings."""
    found = spec.task.locate()
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(
            f"task._target_={spec.task.path} is not a task",
            remedy="name a subclass of sparsepipe.tasks.task.Task, as docs/extending.md shows",
        )
    return found(**spec.task.arguments)
