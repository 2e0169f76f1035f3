"""Whether ranks could carry out a schedule, and the action that is wrong if not.

Execution is played through without clocks: a rank waits where an input has not come, where a
channel is full, or for the other replicas at an update. What cannot go on is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.plan import Plan

_ORDER = "give every minibatch one forward and then one backward in each stage"
Part = tuple[int, int | None]
"""(minibatch, microbatch)."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of an action: ``take`` or ``put`` a message, or ``meet`` the stage's replicas."""

    what: str
    peer: int
    part: Part
    action: Action


def check(
    schedule: Schedule,
    *,
    outbox: int | None = None,
    gradient_first: bool = True,
    max_staleness: int | None = None,
) -> None:
    """Checks order, routing, deadlocks and staleness.

    Args:
        schedule: what is checked.
        outbox: messages that a channel (a pair of ranks and a direction) holds before its
            sender waits; 0 is a blocking rendezvous, None has no limit.
        gradient_first: a rank sends the input's gradient before it meets its replicas for the
            update; otherwise after it, as PipeDream does.
        max_staleness: updates that may come between a minibatch's forward and its own update;
            0 for a synchronous schedule, the stages' largest warm-up for the asynchronous.

    Raises:
        ScheduleError: naming the rank and the action.
    """
    _check_lists(schedule)
    _check_stages(schedule)
    _play(schedule, outbox=outbox, gradient_first=gradient_first)
    if max_staleness is not None:
        _check_staleness(schedule, max_staleness)


def _check_lists(schedule: Schedule) -> None:
    """Within each rank: forward before backward before update, nothing twice."""
    plan = schedule.plan
    for rank, actions in enumerate(schedule.actions):
        begun: set[Part] = set()
        ended: set[Part] = set()
        updates = 0
        for action in actions:
            part = (action.number, action.microbatch)
            if action.kind == "U":
                if action.number != updates:
                    raise _wrong(rank, action, f"comes where U{updates} should", "number updates")
                updates += 1
                continue
            owner = plan.rank_for(plan.stage_of(rank), action.turn)
            if rank != owner:
                raise _wrong(rank, action, f"belongs to rank {owner}", "hand parts round in turn")
            if action.kind == "F":
                if part in begun:
                    raise _wrong(rank, action, "runs twice", _ORDER)
                begun.add(part)
            else:
                if part not in begun or part in ended:
                    raise _wrong(rank, action, "has no forward before it", _ORDER)
                ended.add(part)
                last = _own_update(plan, rank, action)
                if last < updates:
                    raise _wrong(rank, action, f"comes after its update U{last}", _ORDER)
        for part in begun - ended:
            raise _wrong(rank, Action("F", *part), "has no backward", _ORDER)


def _check_stages(schedule: Schedule) -> None:
    """Every stage runs every minibatch, and makes the updates that these call for."""
    plan = schedule.plan
    forwards = [
        {
            (a.number, a.microbatch)
            for rank in plan.ranks_of(stage)
            for a in schedule.actions[rank]
            if a.kind == "F"
        }
        for stage in range(plan.num_stages)
    ]
    parts = set().union(*forwards)
    minibatches = max((number for number, _ in parts), default=-1) + 1
    is_split = any(microbatch is not None for _, microbatch in parts)
    if is_split and any(microbatch is None for _, microbatch in parts):
        raise ScheduleError(
            "some minibatches are split into microbatches and others are not",
            remedy="split all or none: updates count minibatches in one case, rounds in the other",
        )
    begun = {number for number, _ in parts}
    parts |= {(m, 0 if is_split else None) for m in range(minibatches) if m not in begun}
    for stage, found in enumerate(forwards):
        for number, microbatch in sorted(parts - found, key=lambda p: (p[0], p[1] or 0)):
            action = Action("F", number, microbatch)
            rank = plan.rank_for(stage, action.turn)
            raise _wrong(rank, action, f"is missing in stage {stage}", _ORDER)
        rounds = minibatches if is_split else -(-minibatches // plan.replicas(stage))
        for rank in plan.ranks_of(stage):
            _check_updates(schedule, rank, rounds)


def _check_updates(schedule: Schedule, rank: int, rounds: int) -> None:
    updates = sum(action.kind == "U" for action in schedule.actions[rank])
    if updates < rounds:
        remedy = "update once a round, replicas without a minibatch in the last one too"
        raise _wrong(rank, Action("U", updates), "is missing", remedy)
    if updates > rounds:
        raise _wrong(rank, Action("U", rounds), "has no minibatch", "leave it out")


def _steps(schedule: Schedule, rank: int, *, gradient_first: bool) -> Iterator[_Step]:
    """What a rank waits for and hands on, in order."""
    plan = schedule.plan
    stage = plan.stage_of(rank)
    held: list[_Step] = []  # gradients that wait for an update
    for action in schedule.actions[rank]:
        part = (action.number, action.microbatch)
        if action.kind == "U":
            yield _Step("meet", rank, part, action)
            yield from held
            held = []
            continue
        source, target = (stage - 1, stage + 1) if action.kind == "F" else (stage + 1, stage - 1)
        if 0 <= source < plan.num_stages:
            yield _Step("take", plan.rank_for(source, action.turn), part, action)
        if 0 <= target < plan.num_stages:
            step = _Step("put", plan.rank_for(target, action.turn), part, action)
            if action.kind == "B" and not gradient_first:
                held.append(step)
            else:
                yield step
    yield from held


def _play(schedule: Schedule, *, outbox: int | None, gradient_first: bool) -> None:
    """Lets every rank go on as far as it can until all are through."""
    plan = schedule.plan
    todo = [
        deque(_steps(schedule, rank, gradient_first=gradient_first))
        for rank in range(plan.num_ranks)
    ]
    channels: dict[tuple[int, int, str], deque[Part]] = defaultdict(deque)

    def channel(rank: int, step: _Step) -> deque[Part]:
        ends = (rank, step.peer) if step.what == "put" else (step.peer, rank)
        return channels[(*ends, step.action.kind)]

    def may_go(rank: int, step: _Step) -> bool:
        if step.what == "take":
            ready = channel(rank, step)
            if ready and ready[0] != step.part:
                raise _wrong(rank, step.action, f"meets part {ready[0]} first", "keep the order")
            return bool(ready)
        if step.what == "put":
            waiting = channel(rank, step)
            if outbox is None or len(waiting) < outbox:
                return True
            # A rendezvous: the other end is at the very place where it takes this.
            there = todo[step.peer][0] if todo[step.peer] else None
            return (
                outbox == 0
                and there is not None
                and (there.what, there.peer, there.part) == ("take", rank, step.part)
                and there.action.kind == step.action.kind
            )
        heads = [todo[r][0] if todo[r] else None for r in plan.ranks_of(plan.stage_of(rank))]
        return all(h is not None and h.what == "meet" and h.part == step.part for h in heads)

    while any(todo):
        moved = False
        for rank, steps in enumerate(todo):
            while steps and may_go(rank, steps[0]):
                moved = True
                step = steps[0]
                if step.what == "meet":
                    for other in plan.ranks_of(plan.stage_of(rank)):
                        todo[other].popleft()
                    continue
                steps.popleft()
                if step.what == "put":
                    channel(rank, step).append(step.part)
                else:
                    channel(rank, step).popleft()
        if not moved:
            raise _deadlock(todo)


def _deadlock(todo: list[deque[_Step]]) -> ScheduleError:
    waits = {"take": "waits for rank {}", "put": "cannot send to rank {}", "meet": "waits for its"
             " stage's replicas"}  # fmt: skip
    stuck = [
        f"rank {rank} {waits[steps[0].what].format(steps[0].peer)} at {steps[0].action}"
        for rank, steps in enumerate(todo)
        if steps
    ]
    return ScheduleError(
        "deadlock: " + "; ".join(stuck),
        remedy="send gradients before the all-reduce, and let channels hold a message more",
    )


def _check_staleness(schedule: Schedule, bound: int) -> None:
    plan = schedule.plan
    for rank, actions in enumerate(schedule.actions):
        updates = 0
        for action in actions:
            if action.kind == "U":
                updates += 1
            elif action.kind == "F":
                stale = _own_update(plan, rank, action) - updates
                if stale > bound:
                    said = f"is {stale} updates older than its own, the bound is {bound}"
                    raise _wrong(rank, action, said, "run fewer forwards ahead")


def _own_update(plan: Plan, rank: int, action: Action) -> int:
    """Number of the update that a backward's gradient is part of."""
    if action.microbatch is not None:
        return action.number
    return action.number // plan.replicas(plan.stage_of(rank))


def _wrong(rank: int, action: Action, what: str, remedy: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}: {action} {what}", remedy=remedy)
