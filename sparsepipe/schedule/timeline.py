"""When every action of a schedule begins and ends, and how long stages wait.

Every rank does its actions in order, each as soon as its input is there. Sending takes no
time; an update begins when all replicas of its stage have come to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.plan import Plan
from sparsepipe.schedule.validity import check

Durations = Callable[[int, Action], float]
"""Time of an action of a stage: ``durations(stage, action)``, in any unit."""

Row = tuple[str, int, int | None, float, float]
"""(kind, number, microbatch, start, end)."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action in time.

    Args:
        rank: who does it.
        action: what.
        start: when it begins, in the unit of the durations.
        end: when it ends.
    """

    rank: int
    action: Action
    start: float
    end: float


def unit_times(
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    update: float = 0.0,
    stages: Sequence[float] | None = None,
) -> Durations:
    """Durations for drawing: the same for every minibatch or microbatch.

    Args:
        forward: of a forward.
        backward: of a backward.
        update: of an update.
        stages: for each stage, how many times longer it takes; all the same by default.
    """
    times = {"F": forward, "B": backward, "U": update}

    def durations(stage: int, action: Action) -> float:
        return times[action.kind] * (1.0 if stages is None else stages[stage])

    return durations


def timeline(schedule: Schedule, durations: Durations | None = None) -> tuple[Span, ...]:
    """When every action runs.

    Args:
        schedule: what is run.
        durations: see :data:`Durations`; :func:`unit_times` by default.

    Returns:
        The spans of rank 0 in order, then those of rank 1, and so on.

    Raises:
        ScheduleError: the schedule cannot be run; see :func:`~sparsepipe.schedule.check`.
    """
    check(schedule)
    run = _Run(schedule, unit_times() if durations is None else durations)
    total = sum(map(len, schedule.actions))
    while sum(map(len, run.spans)) < total:
        moved = [run.go_on(rank) for rank in range(schedule.plan.num_ranks)]
        assert any(moved), "a checked schedule has no deadlock"
    return tuple(span for spans in run.spans for span in spans)


def lanes(schedule: Schedule, spans: Sequence[Span]) -> list[tuple[str, list[Row]]]:
    """The rows of each rank under its name: what :mod:`sparsepipe.plots.timeline` draws."""
    plan = schedule.plan
    found: list[tuple[str, list[Row]]] = [
        (lane_name(plan, rank), []) for rank in range(plan.num_ranks)
    ]
    for span in spans:
        action = span.action
        row = (action.kind, action.number, action.microbatch, span.start, span.end)
        found[span.rank][1].append(row)
    return found


def lane_name(plan: Plan, rank: int) -> str:
    """Name of a rank in drawings, such as ``stage 0, replica 1``."""
    stage = plan.stage_of(rank)
    if plan.replicas(stage) == 1:
        return f"stage {stage}"
    return f"stage {stage}, replica {plan.replica_of(rank)}"


class _Run:
    """A schedule under way: every rank with a clock of its own."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self._schedule = schedule
        self._durations = durations
        self.spans: list[list[Span]] = [[] for _ in schedule.actions]
        self._ends: dict[tuple[int, Action], float] = {}  # of forwards and backwards, by stage
        self._at_update: dict[tuple[int, Action], dict[int, float]] = defaultdict(dict)

    def go_on(self, rank: int) -> bool:
        """Runs a rank as far as it can; whether it did anything."""
        actions, spans = self._schedule.actions[rank], self.spans[rank]
        stage = self._schedule.plan.stage_of(rank)
        before = len(spans)
        while len(spans) < len(actions):
            action = actions[len(spans)]
            start = self._start(rank, stage, action)
            if start is None:
                break
            end = start + self._durations(stage, action)
            spans.append(Span(rank, action, start, end))
            self._ends[stage, action] = end
        return len(spans) > before

    def _start(self, rank: int, stage: int, action: Action) -> float | None:
        """When the rank's next action begins; None while that cannot be known."""
        plan = self._schedule.plan
        free = self.spans[rank][-1].end if self.spans[rank] else 0.0
        if action.kind == "U":
            arrived = self._at_update[stage, action]
            arrived[rank] = free
            return max(arrived.values()) if len(arrived) == plan.replicas(stage) else None
        source = stage - 1 if action.kind == "F" else stage + 1
        if not 0 <= source < plan.num_stages:
            return free
        ready = self._ends.get((source, action))
        return None if ready is None else max(free, ready)


Interval = tuple[float, float]
"""Begin and end."""

Busy = Sequence[Interval]
"""When one rank computes."""


def idle_shares(ranks: Sequence[Busy], *, begin: float, end: float) -> list[float]:
    """The share of a time in which each rank computes nothing.

    Args:
        ranks: what each computes; what lies outside of the time does not count.
        begin: of the time.
        end: of it, later than its begin.
    """
    assert end > begin, (begin, end)

    def busy(intervals: Busy) -> float:
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals)

    return [1 - busy(intervals) / (end - begin) for intervals in ranks]


def bubbles(ranks: Sequence[Busy]) -> list[float]:
    """The share of time that each rank waits while a minibatch is in the pipeline.

    That is from the begin of its first forward to the end of its last backward, after which
    updates come.

    Args:
        ranks: forwards and backwards of one minibatch on each rank; updates are none of them.
    """
    every = [interval for intervals in ranks for interval in intervals]
    assert every, "no rank computes anything"
    begin, end = min(a for a, _ in every), max(b for _, b in every)
    return idle_shares(ranks, begin=begin, end=end)
