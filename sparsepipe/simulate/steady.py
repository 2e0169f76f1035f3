"""How fast a long run goes: it is simulated until it repeats itself, the rest follows from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparsepipe.schedule import Action, Intake, Plan, asynchronous_order
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, run_actions
from sparsepipe.simulate.standing import Lookout
from sparsepipe.simulate.workload import Workload

Order = Callable[[Plan, int, Intake], Iterable[Action]]
"""What a rank does, told as it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a long run goes.

    Attributes:
        minibatches: of the run.
        total_s: from its beginning to the end of its last action.
        minibatch_s: that a minibatch takes in the mean, once the pipeline is full.
        busy: of each rank, the share of the time in which it computes, once the pipeline is full.
        simulated: minibatches that were simulated.
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
    period: int | None = None,
) -> Pace:
    """How fast a plan runs under a schedule, by default the asynchronous one.

    The run is simulated until it stands as it stood a cycle before (:mod:`.standing`). Then whole
    cycles are left out, each of which would take as long as the one that was seen, and the end of
    the run is simulated. Where no cycle is found, all is simulated.

    Args:
        workload: the plan, and what it costs.
        minibatches: of the whole run, at least 1.
        setting: how ranks talk.
        order: of the schedule.
        period: minibatches after which each rank's order of actions repeats itself; None: the
            least common multiple of the stages' numbers of replicas, which take turns.

    Raises:
        ScheduleError: ranks wait for one another for ever.
        PlanError: sums overlap with the backward, and the costs of layers are not known.
    """
    plan, intake = workload.plan, Intake(minibatches)
    if period is None:
        period = math.lcm(*[stage.replicas for stage in plan.stages])
    lookout = Lookout(intake, period)
    actions = [order(plan, rank, intake) for rank in range(plan.num_ranks)]
    record = run_actions(workload, actions, setting, keep=False, lookout=lookout)
    cycle = lookout.cycle
    if cycle is None:
        return _whole(record)
    left_out = minibatches - record.minibatches
    return Pace(
        minibatches=minibatches,
        total_s=record.end_s + left_out // cycle.minibatches * cycle.seconds,
        minibatch_s=cycle.seconds / cycle.minibatches,
        busy=cycle.busy,
        simulated=record.minibatches,
    )


def _whole(record: Record) -> Pace:
    """Of a run in which no cycle was found; its pace is that of the second half."""
    ends_s = record.returns_s
    first = len(ends_s) // 2
    count = len(ends_s) - 1 - first
    minibatch_s = (ends_s[-1] - ends_s[first]) / count if count else record.end_s / len(ends_s)
    each_s = [busy_s / record.minibatches for busy_s in record.busy_s]
    return Pace(
        minibatches=len(ends_s),
        total_s=record.end_s,
        minibatch_s=minibatch_s,
        busy=tuple(min(1.0, seconds / minibatch_s) if minibatch_s else 0.0 for seconds in each_s),
        simulated=record.minibatches,
    )
