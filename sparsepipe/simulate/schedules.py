"""A workload under one of the schedules, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparsepipe.errors import ConfigError
from sparsepipe.schedule import Action, Plan, Schedule, asynchronous, gpipe, naive, one_f_one_b
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, asynchronous_actions, simulate
from sparsepipe.simulate.steady import Actions, Pace, pace
from sparsepipe.simulate.workload import Workload

MICROBATCHES = 4
"""Where a schedule splits minibatches and nobody says into how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a schedule is made.

    Args:
        make: called with the plan, the number of minibatches, and that of microbatches.
        splits: whether minibatches are split into microbatches.
        actions: the same as ``make`` where minibatches are whole, for a run too long to be listed.
    """

    make: Callable[[Plan, int, int], Schedule]
    splits: bool = False
    actions: Actions | None = None


SCHEDULES: Mapping[str, Recipe] = {
    "asynchronous": Recipe(make=lambda p, n, _: asynchronous(p, n), actions=asynchronous_actions),
    "naive": Recipe(make=lambda p, n, _: naive(p, n)),
    "gpipe": Recipe(make=lambda p, n, t: gpipe(p, n, microbatches=t), splits=True),
    "1f1b": Recipe(make=lambda p, n, t: one_f_one_b(p, n, microbatches=t), splits=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is run, how, and on what links.

    Args:
        workload: the plan and what it costs, for each microbatch where there are some.
        setting: how ranks talk.
        recipe: of the schedule.
        microbatches: T, into which each minibatch is split; 1 where none is.
    """

    workload: Workload
    setting: Setting
    recipe: Recipe
    microbatches: int

    @classmethod
    def of(
        cls,
        workload: Workload,
        setting: Setting,
        *,
        schedule: str = "asynchronous",
        microbatches: int | None = None,
    ) -> Simulation:
        """A simulation of a schedule by its name.

        A microbatch is taken to need its share of a minibatch's time and bytes. Real ones need
        more: what a layer costs beside its arithmetic does not shrink.

        Args:
            workload: the plan and what it costs, for each minibatch.
            setting: how ranks talk.
            schedule: one of :data:`SCHEDULES`.
            microbatches: T; None: :data:`MICROBATCHES` where the schedule has some.

        Raises:
            ConfigError: there is no such schedule, or microbatches do not suit it.
        """
        recipe = SCHEDULES.get(schedule)
        if recipe is None:
            raise ConfigError(
                f"there is no schedule called {schedule!r}",
                remedy=f"choose one of {', '.join(SCHEDULES)}",
            )
        if not recipe.splits:
            if microbatches is not None:
                raise ConfigError(
                    f"the schedule {schedule} has no microbatches, and {microbatches} are given",
                    remedy="leave microbatches out, or choose gpipe or 1f1b",
                )
            return cls(workload=workload, setting=setting, recipe=recipe, microbatches=1)
        parts = MICROBATCHES if microbatches is None else microbatches
        if parts < 1:
            raise ConfigError(f"{parts} microbatches", remedy="split minibatches into 1 or more")
        if setting.bucket_bytes is not None:
            raise ConfigError(
                f"sums that overlap with the backward do not suit the schedule {schedule}, whose "
                "gradients are complete with the last microbatch",
                remedy="set overlap to null or false, or choose the schedule asynchronous",
            )
        return cls(
            workload=workload.split(parts), setting=setting, recipe=recipe, microbatches=parts
        )

    def record(self, minibatches: int) -> Record:
        """Runs a number of minibatches, and records everything.

        Raises:
            ScheduleError: the schedule cannot be run.
        """
        made = self.recipe.make(self.workload.plan, minibatches, self.microbatches)
        return simulate(made, self.workload, self.setting)

    def pace(self, minibatches: int) -> Pace:
        """How fast a run of so many minibatches goes.

        Raises:
            ScheduleError: the schedule cannot be run.
        """
        return pace(
            self.workload, minibatches, self.setting, actions=self.recipe.actions or self._actions
        )

    def _actions(self, plan: Plan, minibatches: int) -> list[tuple[Action, ...]]:
        return list(self.recipe.make(plan, minibatches, self.microbatches).actions)
