"""A workload under one of the schedules, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sparsepipe.errors import ConfigError
from sparsepipe.partition.microbatches import check_microbatches, sizes_of
from sparsepipe.schedule import (
    SYNCHRONOUS,
    Action,
    Intake,
    Plan,
    Schedule,
    asynchronous_order,
    naive_order,
)
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, simulate
from sparsepipe.simulate.steady import Pace, pace
from sparsepipe.simulate.workload import Workload

MICROBATCHES = 4
"""Where a schedule splits minibatches and nobody says into how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a schedule is made.

    Args:
        order: what a rank of a plan does, told as it is asked for, with the number of
            microbatches.
        splits: whether minibatches are split into microbatches. Then every minibatch goes like
            the first.
    """

    order: Callable[[Plan, int, Intake, int], Iterable[Action]]
    splits: bool = False


SCHEDULES: Mapping[str, Recipe] = {
    "asynchronous": Recipe(order=lambda p, rank, intake, _: asynchronous_order(p, rank, intake)),
    "naive": Recipe(order=lambda p, rank, intake, _: naive_order(p, rank, intake)),
    **{name: Recipe(order=order, splits=True) for name, order in SYNCHRONOUS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is run, how, and on what links.

    Args:
        workload: the plan and what it costs, for each microbatch where there are some.
        setting: how ranks talk.
        recipe: of the schedule.
        microbatches: T, into which each minibatch is split; 1 where none is.
        batches: that are a minibatch together: where minibatches are split, those that the devices
            of the first stage read, each one.
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
        """A simulation of a schedule by its name.

        A microbatch is taken to need its share of a minibatch's time and bytes. Real ones need
        more: what a layer costs beside its arithmetic does not shrink. Each of the first stage's
        devices reads a batch, and all of these are one minibatch, as in training. Where the number
        of microbatches is no multiple of theirs, all take the same time nevertheless.

        Args:
            workload: the plan and what it costs, for each batch that a device of the first stage
                reads.
            setting: how ranks talk.
            schedule: one of :data:`SCHEDULES`.
            microbatches: T; None: :data:`MICROBATCHES` where the schedule has some.
            option: that says T, for errors.

        Raises:
            ConfigError: there is no such schedule, or microbatches do not suit it or the plan.
        """
        recipe = SCHEDULES.get(schedule)
        if recipe is None:
            raise ConfigError(
                f"there is no schedule called {schedule!r}",
                remedy=f"choose one of {', '.join(SCHEDULES)}",
            )
        if recipe is not SCHEDULES["asynchronous"]:
            # Each minibatch ends before the next update: all weights in use are the newest.
            workload = replace(workload, vertical_sync=False)
        if not recipe.splits:
            if microbatches is not None:
                raise ConfigError(
                    f"the schedule {schedule} has no microbatches, and {microbatches} are given",
                    remedy="leave microbatches out, or choose gpipe, 1f1b or eager_1f1b",
                )
            return cls(workload=workload, setting=setting, recipe=recipe, microbatches=1)
        parts = MICROBATCHES if microbatches is None else microbatches
        check_microbatches(parts, workload.plan.replicas_of_stages, name=option)
        if setting.bucket_bytes is not None:
            raise ConfigError(
                f"sums that overlap with the backward do not suit the schedule {schedule}, whose "
                "gradients are complete with the last microbatch",
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
        """Of the microbatches of a minibatch, 1 being their mean; None where all are as large.

        Where their number is no multiple of the first stage's devices, some of these cut their
        batch into fewer.
        """
        if self.microbatches % self.batches == 0:
            return None
        share = self.batches / self.microbatches
        return [size / share for size in sizes_of(self.microbatches, self.batches)]

    def record(self, minibatches: int) -> Record:
        """Runs a number of minibatches, and records everything.

        Raises:
            ScheduleError: the schedule cannot be run.
        """
        plan = self.workload.plan
        orders = (self.order(rank, minibatches) for rank in range(plan.num_ranks))
        made = Schedule(plan, tuple(map(tuple, orders)))
        return simulate(made, self.workload, self.setting)

    def order(self, rank: int, minibatches: int) -> Iterable[Action]:
        """What a rank does in a run of a number of minibatches."""
        return self._order(self.workload.plan, rank, Intake(minibatches))

    def pace(self, minibatches: int) -> Pace:
        """How fast a run of so many minibatches goes.

        Raises:
            ScheduleError: the schedule cannot be run.
        """
        return pace(
            self.workload,
            minibatches,
            self.setting,
            order=self._order,
            splits=self.recipe.splits,
        )

    def _order(self, plan: Plan, rank: int, intake: Intake) -> Iterable[Action]:
        return self.recipe.order(plan, rank, intake, self.microbatches)
