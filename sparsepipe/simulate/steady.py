"""How fast a long run goes: it is simulated until it repeats itself, the rest follows from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import linear_regression

from sparsepipe.schedule import Action, Intake, Plan, asynchronous_order
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, run_actions
from sparsepipe.simulate.standing import Cycle, Lookout
from sparsepipe.simulate.workload import Workload

Order = Callable[[Plan, int, Intake], Iterable[Action]]
"""What a rank does, told as it is asked for."""

Run = tuple[Record, Cycle | None]
"""What happened, and the cycle by which it was cut short; None: none was found."""

_LEAST = 1000
"""Minibatches of any run that is long enough."""
_ROUNDS = 8
"""A run that is long enough has so many minibatches for each rank, and so many periods where these
are short: it repeats itself by then, if it does at all, or has run most of its time since the
pipeline was full. The longest found in benchmarks/simulate.py is 5.8 periods."""
_LONG_PERIOD = 4
"""Minibatches for each rank from which on a period is too long to wait for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a long run goes.

    Attributes:
        minibatches: of the run.
        total_s: from its beginning to the end of its last action.
        minibatch_s: that a minibatch takes in the mean, once the pipeline is full, in a run that
            goes on for long: no matter how short this one is.
        busy: of each rank, the share of the time in which it computes; the same.
        simulated: minibatches that were simulated for that.
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
    """How fast a plan runs under a schedule, by default the asynchronous one.

    The run is simulated until it stands as it stood a cycle before (:mod:`.standing`). Then whole
    cycles are left out, each of which would take as long as the one that was seen, and the end of
    the run is simulated. Where no cycle is found, all is simulated; and to know how fast the
    pipeline is when it is full, a longer run is, which again is cut short by its cycle.

    Args:
        workload: the plan, and what it costs.
        minibatches: of the whole run, at least 1.
        setting: how ranks talk.
        order: of the schedule.
        splits: minibatches are split over the replicas of a stage, so that every minibatch goes
            like the first; else replicas take turns.

    Raises:
        ScheduleError: ranks wait for one another for ever.
        PlanError: sums overlap with the backward, and the costs of layers are not known.
    """
    plan = workload.plan
    period = 1 if splits else math.lcm(*[stage.replicas for stage in plan.stages])

    def run(count: int) -> Run:
        intake = Intake(count)
        lookout = Lookout(intake, period)
        actions = [order(plan, rank, intake) for rank in range(plan.num_ranks)]
        record = run_actions(workload, actions, setting, keep=False, lookout=lookout)
        return record, lookout.cycle

    runs = _runs(run, minibatches, enough=_enough(plan, period))
    return _told_by(runs, minibatches, splits=splits)


def _runs(run: Callable[[int], Run], minibatches: int, *, enough: int) -> list[Run]:
    """A run of so many minibatches; then a longer one, where the first does not tell the pace.

    Args:
        run: simulates a number of minibatches.
        minibatches: of the first.
        enough: of a run that is long enough.
    """
    first = run(minibatches)
    _, cycle = first
    if cycle is None and minibatches < enough:
        return [first, run(enough)]
    return [first]


def _told_by(runs: Sequence[Run], minibatches: int, *, splits: bool) -> Pace:
    """What runs tell: the first of them when all ends, the last one the pace."""
    (record, cycle), (longer, its_cycle) = runs[0], runs[-1]
    left_out_s = 0.0
    if cycle is not None:
        left_out = minibatches - record.minibatches
        left_out_s = left_out // cycle.minibatches * cycle.seconds
    full = its_cycle or _measured(longer, splits=splits)
    return Pace(
        minibatches=minibatches,
        total_s=record.end_s + left_out_s,
        minibatch_s=full.seconds / full.minibatches,
        busy=full.busy,
        simulated=sum(each.minibatches for each, _ in runs),
    )


def _enough(plan: Plan, period: int) -> int:
    """Minibatches of a run that is long enough to tell how fast the pipeline is when it is full."""
    ranks = plan.num_ranks
    waits = period if period <= _LONG_PERIOD * ranks else 0
    return max(_LEAST, _ROUNDS * (ranks + waits))


def _measured(record: Record, *, splits: bool) -> Cycle:
    """Of a run that is long enough, and in which no cycle was found.

    Minibatches come back in rounds of every stage's replicas at a time. So its pace is the slope of
    the line that lies nearest to their returns, from when the pipeline is full to before it drains,
    and over whole rounds of the first stage.
    """
    plan, count = record.plan, len(record.returns_s)
    readers = 1 if splits else plan.replicas(0)
    first = count // 3 // readers * readers
    last = (count - 2 * plan.num_ranks) // readers * readers
    # Since when each minibatch and all before it are back: what the next of its round may wait for.
    back_s = list(accumulate(record.returns_s, max))[first:last]
    minibatch_s = linear_regression(range(first, last), back_s).slope
    busy = []
    for rank, busy_s in enumerate(record.busy_s):
        stage, replica = plan.stage_of(rank), plan.replica_of(rank)
        # Minibatches for each of which this rank has computed something.
        share = 1 if splits else plan.replicas(stage)
        computed = count if splits else len(range(replica, count, share))
        each_s = busy_s / computed / share
        busy.append(min(1.0, each_s / minibatch_s) if minibatch_s else 0.0)
    minibatches = last - first
    return Cycle(minibatches=minibatches, seconds=minibatches * minibatch_s, busy=tuple(busy))
