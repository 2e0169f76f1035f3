"""Simulates a workload under a schedule given by name; computes the pace of long runs, which are
simulated only until they repeat themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import linear_regression

from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory import check_microbatches, sizes_of
from sparsepipe.schedule import (
    SYNCHRONOUS,
    Action,
    MinibatchSupply,
    Plan,
    Schedule,
    asynchronous_order,
    naive_order,
)
from sparsepipe.simulate.engine import Cycle, CycleDetector, Engine, Record, Setting, simulate
from sparsepipe.simulate.workload import Workload
from sparsepipe.utils.extensions import by_name

Order = Callable[[Plan, int, MinibatchSupply], Iterable[Action]]
"""Function that generates a rank's actions from a plan, the rank and the minibatch supply."""

_LEAST = 1000
"""A run whose pace is measured, for lack of a cycle, has at least this number of minibatches."""

_ROUNDS = 8
"""A run whose pace is measured has at least this many minibatches for each rank, plus this many
periods if they are short: runs with a cycle reach it in 5.8 periods in benchmarks/simulate.py."""

_LONG_PERIOD = 4
"""A period counts as short if it has at most this number of minibatches for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of a run.

    Attributes:
        minibatches: number of minibatches of the run.
        total_s: seconds from the beginning of the run to the end of its last action.
        minibatch_s: mean seconds from one minibatch to the next while the pipeline is full.
        busy: share of the time in which each rank computes while the pipeline is full, by rank.
        simulated: number of minibatches that were simulated to obtain these values.
    """

    minibatches: int
    total_s: float
    minibatch_s: float
    busy: tuple[float, ...]
    simulated: int


def pace(
    workload: Workload,
    minibatches: int,
    setting: Setting,
    *,
    order: Order = asynchronous_order,
    splits: bool = False,
) -> Pace:
    """Computes how fast a plan runs under a schedule, by default the asynchronous one.

    The run is simulated until its state recurs (:class:`.engine.CycleDetector`); whole cycles are
    then skipped, and the end of the run is simulated. If a short run has no cycle, a longer one
    gives the pace of a full pipeline. With ``splits``, minibatches are split into microbatches;
    otherwise the replicas of a stage take minibatches in turn.
    """
    plan = workload.plan
    period = 1 if splits else math.lcm(*[stage.replicas for stage in plan.stages])

    def run(count: int) -> tuple[Record, Cycle | None]:
        supply = MinibatchSupply(count)
        detector = CycleDetector(supply, period)
        actions = [order(plan, rank, supply) for rank in range(plan.num_ranks)]
        record = Engine(workload, actions, setting, keep=False, detector=detector).run()
        return record, detector.cycle

    record, cycle = run(minibatches)
    total_s, simulated, full = record.end_s, record.minibatches, cycle
    if cycle is not None:
        total_s += (minibatches - record.minibatches) // cycle.minibatches * cycle.seconds
    else:
        waits = period if period <= _LONG_PERIOD * plan.num_ranks else 0
        enough = max(_LEAST, _ROUNDS * (plan.num_ranks + waits))
        if minibatches < enough:  # too short to measure the pace
            record, full = run(enough)
            simulated += record.minibatches
    full = full or _measured(record, splits=splits)
    return Pace(
        minibatches=minibatches,
        total_s=total_s,
        minibatch_s=full.seconds / full.minibatches,
        busy=full.busy,
        simulated=simulated,
    )


def _measured(record: Record, *, splits: bool) -> Cycle:
    """The pace of a run without a cycle: the slope of minibatches' returns while it is full."""
    plan, count = record.plan, len(record.returns_s)
    readers = 1 if splits else plan.replicas(0)
    first = count // 3 // readers * readers
    last = (count - 2 * plan.num_ranks) // readers * readers
    # When each minibatch and all before it are back: the next of its round may wait for that.
    back_s = list(accumulate(record.returns_s, max))[first:last]
    minibatch_s = linear_regression(range(first, last), back_s).slope
    busy = []
    for rank, busy_s in enumerate(record.busy_s):
        stage, replica = plan.stage_of(rank), plan.replica_of(rank)
        # This rank computes for one in so many minibatches.
        share = 1 if splits else plan.replicas(stage)
        computed = count if splits else len(range(replica, count, share))
        each_s = busy_s / computed / share
        busy.append(min(1.0, each_s / minibatch_s) if minibatch_s else 0.0)
    minibatches = last - first
    return Cycle(minibatches=minibatches, seconds=minibatches * minibatch_s, busy=tuple(busy))


MICROBATCHES = 4
"""Default number of microbatches of a minibatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the actions of a schedule are generated.

    Args:
        order: function that generates a rank's actions from the plan, the rank, the supply of
            minibatches and the number of microbatches.
        splits: whether minibatches are split into microbatches.
    """

    order: Callable[[Plan, int, MinibatchSupply, int], Iterable[Action]]
    splits: bool = False


SCHEDULES: Mapping[str, Recipe] = {
    "asynchronous": Recipe(order=lambda p, rank, supply, _: asynchronous_order(p, rank, supply)),
    "naive": Recipe(order=lambda p, rank, supply, _: naive_order(p, rank, supply)),
    **{name: Recipe(order=order, splits=True) for name, order in SYNCHRONOUS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A workload, its schedule, and the network.

    Args:
        workload: the plan and its costs, per microbatch if the schedule splits minibatches.
        setting: how ranks communicate.
        recipe: how the actions of the schedule are generated.
        microbatches: T, the number of microbatches of a minibatch; 1 if the schedule does not
            split minibatches.
        batches: number of batches that make a minibatch: one from each device of the first stage
            if minibatches are split, otherwise 1.
    """

    workload: Workload
    setting: Setting
    recipe: Recipe
    microbatches: int
    batches: int = 1

    @classmethod
    def of(
        cls,
        workload: Workload,
        setting: Setting,
        *,
        schedule: str = "asynchronous",
        microbatches: int | None = None,
        option: str = "microbatches",
    ) -> Simulation:
        """Makes a simulation of the schedule named ``schedule``.

        A microbatch counts with its share of a minibatch's time and bytes; real ones take longer.
        If minibatches are split, the batches of all devices of the first stage are one minibatch.

        Args:
            workload: the plan and its costs per batch that a device of the first stage reads.
            setting: how ranks communicate.
            schedule: one of :data:`SCHEDULES`, or the dotted path of a synchronous schedule, as in
                :func:`~sparsepipe.schedule.order_by_name`.
            microbatches: T; None: :data:`MICROBATCHES` if the schedule splits minibatches.
            option: name of the setting for T in error messages.
        """
        found = by_name(schedule, SCHEDULES, kind="schedule")
        recipe = found if isinstance(found, Recipe) else Recipe(order=found, splits=True)
        if recipe is not SCHEDULES["asynchronous"]:
            # Each minibatch ends before the next update: all weights in use are the newest.
            workload = replace(workload, vertical_sync=False)
        if not recipe.splits:
            if microbatches is not None:
                raise ConfigError(
                    f"{option}={microbatches} does not suit the schedule {schedule}, which does "
                    "not split minibatches",
                    remedy=f"leave {option} out, or choose gpipe, 1f1b or eager_1f1b",
                )
            return cls(workload=workload, setting=setting, recipe=recipe, microbatches=1)
        parts = MICROBATCHES if microbatches is None else microbatches
        check_microbatches(parts, workload.plan.replicas_of_stages, name=option)
        if setting.bucket_bytes is not None:
            raise ConfigError(
                f"sums that overlap with the backward pass do not suit the schedule {schedule}, "
                "whose gradients are complete only after the last microbatch",
                remedy="set overlap to null or false, or choose the schedule asynchronous",
            )
        batches = workload.plan.replicas(0)
        return cls(
            workload=workload.split(parts, batches=batches),
            setting=setting,
            recipe=recipe,
            microbatches=parts,
            batches=batches,
        )

    @property
    def sizes(self) -> list[float] | None:
        """Sizes of a minibatch's microbatches relative to their mean; None: all are equal."""
        if self.microbatches % self.batches == 0:
            return None
        share = self.batches / self.microbatches
        return [size / share for size in sizes_of(self.microbatches, self.batches)]

    def record(self, minibatches: int) -> Record:
        """Simulates ``minibatches`` minibatches and records all spans."""
        plan = self.workload.plan
        orders = (tuple(self.order(rank, minibatches)) for rank in range(plan.num_ranks))
        return simulate(Schedule(plan, tuple(orders)), self.workload, self.setting)

    def order(self, rank: int, minibatches: int) -> Iterable[Action]:
        """A rank's actions in a run of ``minibatches`` minibatches."""
        supply = MinibatchSupply(minibatches)
        return self.recipe.order(self.workload.plan, rank, supply, self.microbatches)

    def pace(self, minibatches: int) -> Pace:
        """The pace of a run of ``minibatches`` minibatches."""
        return pace(
            self.workload,
            minibatches,
            self.setting,
            order=lambda p, rank, supply: self.recipe.order(p, rank, supply, self.microbatches),
            splits=self.recipe.splits,
        )
