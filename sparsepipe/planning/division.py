"""How ``parallel.plan`` splits a model into stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepipe.config.compose import ASSETS
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.schedule import Plan
from sparsepipe.utils import reading
from sparsepipe.utils.files import expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a model is split into stages.

    Args:
        config: replicas of each stage, such as ``"2-1"``; None: one replica of each stage.
        cuts: index of the first layer of each stage after the first; None: equal shares.
        balance: the quantity, such as ``flops``, to share evenly between stages without cuts.
        grids: the grid of each stage (None: no spatial parallelism); None: no stage has one.
        num_layers: number of layers that a plan file covers; None: no file.
        devices: names of a plan file's devices, one for each rank; None: no file.
        details: further entries of a plan file.
        file: path of the plan file; None: no file.
    """

    config: str | None
    cuts: tuple[int, ...] | None
    balance: str
    grids: tuple[tuple[int, ...] | None, ...] | None = None
    num_layers: int | None = None
    devices: tuple[str, ...] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = field(default=None, compare=False)

    @property
    def searched(self) -> bool:
        """Whether the plan file is the result of a search."""
        return "strategy" in self.details

    @property
    def replicas(self) -> tuple[int, ...] | None:
        """Number of replicas of each stage; None if the number of stages is open. Raises a
        PlanError if ``config`` is malformed.
        """
        if self.config is None:
            return None if self.cuts is None else (1,) * (len(self.cuts) + 1)
        return self._stages(self.config).replicas_of_stages

    def _stages(self, config: str) -> Plan:
        """A plan with the stages of ``config``, one layer each, to answer questions about ranks."""
        count = len(config.split("-"))
        return Plan.of(config=config, cuts=range(1, count), num_layers=count, grids=self.grids)

    @property
    def num_ranks(self) -> int | None:
        """Number of devices that the division needs; None if it suits any number. Raises a
        PlanError if ``config`` is malformed.
        """
        replicas = self.replicas
        return None if replicas is None else self._stages("-".join(map(str, replicas))).num_ranks

    def naming_file(self) -> AbstractContextManager[None]:
        """Names the plan file, if there is one, in errors that the ``with`` block raises."""
        if self.file is None:
            return nullcontext()
        return reading.explained(self.file, "plan", error=PlanError, remedy="correct it")

    def check(self, *, num_layers: int) -> None:
        """Refuses a division that does not fit a model of ``num_layers`` layers.

        Raises:
            PlanError: the plan file covers another number of layers, the division has more stages
                than the model has layers, or its config and cuts are not valid.
        """
        with self.naming_file():
            if self.num_layers not in (None, num_layers):
                raise PlanError(
                    f"the plan covers {self.num_layers} layers, but the model has {num_layers}",
                    remedy="make a plan for this model, or choose the model that it was made for",
                )
            config = self.config or "-".join("1" for _ in range(len(self.cuts or ()) + 1))
            if (stages := config.count("-") + 1) > num_layers:
                raise PlanError(
                    f"the plan {config} has {stages} stages, more than the layers ({num_layers})",
                    remedy="give the plan at most one stage for each layer",
                )
            if self.cuts is not None:
                Plan.of(config=config, cuts=self.cuts, num_layers=num_layers)

    def name(self, rank: int, *, ranks: int) -> str:
        """A rank, of ``ranks`` in all, and its stage as text, such as ``rank 2 (stage 1)``."""
        plan = self._stages(self.config or "-".join("1" * ranks))
        return f"rank {rank} (stage {plan.stage_of(rank)})"

    def arguments(self) -> dict[str, Any]:
        """The arguments for a strategy that splits models; ``grids`` only if a stage has a grid."""
        cuts = None if self.cuts is None else list(self.cuts)
        grids = None if self.grids is None else [each and list(each) for each in self.grids]
        given = {"config": self.config, "cuts": cuts, "balance": self.balance}
        return given if grids is None else {**given, "grids": grids}


def division_of(spec: RunSpec) -> Division | None:
    """The division that ``parallel.plan`` sets; None if it is not set.

    Raises:
        ConfigError: a key is in the wrong place or contradicts another, or the strategy cannot
            split models.
        PlanError: the plan file is missing or invalid.
    """
    chosen, strategy, splits = spec.parallel.plan, spec.parallel.strategy, spec.parallel.splits
    given = () if strategy is None or not splits else strategy.arguments
    if misplaced := [name for name in ("config", "cuts", "balance", "grids") if name in given]:
        raise ConfigError(
            f"parallel.strategy.{misplaced[0]} is set, but parallel.plan divides the model",
            remedy=f"set parallel.plan.{misplaced[0]}"
            if misplaced[0] != "grids"
            else "give a plan file, parallel.plan.file, in which stages have a grid",
        )
    if chosen is None:
        return None
    if not splits:
        raise ConfigError(
            "parallel.plan is set, but parallel.strategy does not split models",
            remedy="choose parallel=pipeline, or leave parallel.plan out",
        )
    if chosen.file is None:
        return Division(
            config=None if chosen.config is None else str(chosen.config),
            cuts=None if chosen.cuts is None else tuple(chosen.cuts),
            balance=chosen.balance,
        )
    if (chosen.config, chosen.cuts) != (None, None):
        raise ConfigError(
            "parallel.plan has both file and config or cuts",
            remedy="set either file, or config and cuts, and the others to null",
        )
    return read_plan_file(own_or_shipped(chosen.file), balance=chosen.balance)


def own_or_shipped(name: str) -> Path:
    """Path of the file ``name`` or, if only that exists, of the shipped file of that name."""
    path, shipped = expanded(name), ASSETS / name
    return shipped if not path.exists() and shipped.exists() else path


def read_plan_file(
    path: Path, *, balance: str = "flops", key: str = "parallel.plan.file"
) -> Division:
    """Reads the division from a plan file; ``key`` is the setting to name in errors.

    Raises:
        PlanError: the file is missing, is not a valid plan or divides a branching graph.
    """
    read = Plan.load(path, remedy=f"correct {key}")
    if read.details.get("states"):
        raise PlanError(
            f"{path} divides a branching graph by its states, but a model is a chain of layers",
            remedy="profile the model with task=profile, and make a plan from that profile",
        )
    return Division(
        config=read.config,
        cuts=read.cuts,
        balance=balance,
        grids=tuple(stage.grid for stage in read.stages) if read.has_grids else None,
        num_layers=read.num_layers,
        devices=tuple(name for stage in read.stages for name in stage.devices),
        details=read.details,
        file=path,
    )
