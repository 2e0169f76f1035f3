"""How a long run goes: simulated until it repeats itself, and counted on from there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sparsepipe.schedule import Action, Plan
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, asynchronous_actions, run_actions
from sparsepipe.simulate.workload import Workload

_EQUAL = 1e-9
_CYCLES = 3
"""That must look alike before a run counts as steady."""

Actions = Callable[[Plan, int], Sequence[Iterable[Action]]]
"""Each rank's actions in a run of a number of minibatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a long run goes.

    Attributes:
        minibatches: of the run.
        total_s: from its beginning to the end of its last action.
        minibatch_s: between two minibatches once the pipeline is filled, in the mean.
        busy: of each rank, the share of its time in which it computes, once filled.
        simulated: minibatches that were simulated; the others follow from these.
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
    actions: Actions = asynchronous_actions,
) -> Pace:
    """How fast a schedule goes in the long run: by default the asynchronous pipeline's.

    The schedule repeats itself every P minibatches, the least common multiple of the stages'
    replicas, and once all queues have their lengths, times repeat every few P. So a shorter run
    is simulated; where its last cycles before the drain take the same time, one that ends at the
    same place of the cycle as the long one tells when that ends. Else a longer one is tried, up
    to the whole.

    Args:
        workload: the plan, and what it costs.
        minibatches: of the whole run, at least 1.
        setting: how ranks talk.
        actions: of the schedule; with one stage all are data parallelism.

    Raises:
        ScheduleError: ranks wait for one another for ever.
    """
    plan = workload.plan
    period = math.lcm(*[stage.replicas for stage in plan.stages])
    ahead = (plan.warmup(0) + 1) * plan.replicas(0)
    # Of whole periods: each replica has its share of the minibatches then.
    length = -(-2 * ahead // period) * period + (_CYCLES + 2) * period
    while length < minibatches:
        record = _run(workload, length, setting, actions)
        cycle = cycle_of(record.returns_s[: length - ahead], period)
        if cycle is None:
            length *= 2
            continue
        each_s = _each_s(record)
        rest = (minibatches - length) % cycle
        if rest:
            record = _run(workload, length + rest, setting, actions)
        at = length - ahead
        cycle_s = record.returns_s[at - 1] - record.returns_s[at - 1 - cycle]
        end_s = record.end_s + (minibatches - record.minibatches) // cycle * cycle_s
        return _pace(record, minibatches, end_s, cycle_s / cycle, each_s)
    return _exact(_run(workload, minibatches, setting, actions))


def cycle_of(ends_s: Sequence[float], period: int) -> int | None:
    """After how many minibatches times repeat at the end of a run; None if they do not.

    Args:
        ends_s: of each minibatch.
        period: of the schedule, in minibatches.

    Returns:
        A multiple of the period.
    """
    for cycle in range(period, len(ends_s) // _CYCLES, period):
        seen = (_CYCLES - 1) * cycle
        took_s = [ends_s[-1 - k] - ends_s[-1 - k - cycle] for k in range(seen)]
        if max(took_s) - min(took_s) <= _EQUAL * max(took_s):
            return cycle
    return None


def _run(workload: Workload, minibatches: int, setting: Setting, actions: Actions) -> Record:
    return run_actions(workload, actions(workload.plan, minibatches), setting, keep=False)


def _exact(record: Record) -> Pace:
    """Of a run that was simulated whole; the pace is that of its later half."""
    ends_s = record.returns_s
    first = len(ends_s) // 2
    count = len(ends_s) - 1 - first
    minibatch_s = (ends_s[-1] - ends_s[first]) / count if count else record.end_s / len(ends_s)
    return _pace(record, len(ends_s), record.end_s, minibatch_s, _each_s(record))


def _each_s(record: Record) -> list[float]:
    """How long each rank has computed for each minibatch of all, in the mean."""
    return [busy_s / record.minibatches for busy_s in record.busy_s]


def _pace(
    record: Record, minibatches: int, total_s: float, minibatch_s: float, each_s: Sequence[float]
) -> Pace:
    return Pace(
        minibatches=minibatches,
        total_s=total_s,
        minibatch_s=minibatch_s,
        busy=tuple(min(1.0, seconds / minibatch_s) if minibatch_s else 0.0 for seconds in each_s),
        simulated=record.minibatches,
    )
