"""Checks whether ranks could carry out a schedule; if not, an error names the wrong action.

The schedule is played through without times: a rank waits for an input that has not come, for a
channel that is full, or for the other replicas at an update. If all ranks wait, that is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.plan import Plan

_ORDER = "in each stage, give every minibatch one forward, then one backward, then its update"
Part = tuple[int, int | None]
"""Number of a minibatch, and of its microbatch; the second is None if it is not split."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Communication of an action: ``take`` or ``put`` a message, or ``meet`` the other replicas.

    ``peer`` is the rank that sends or gets the message; for ``meet``, it is the rank itself.
    """

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
        schedule: the schedule to check.
        outbox: number of messages that a channel (a pair of ranks and a direction) holds before its
            sender waits; 0: the sender waits until its message is taken; None: no limit.
        gradient_first: whether a rank sends the gradient of its input before it meets the other
            replicas for the update; otherwise after the update, as in PipeDream.
        max_staleness: largest number of updates between a minibatch's forward and its own update:
            0 for a synchronous schedule, the largest warm-up of any stage for the asynchronous one;
            None: no limit.

    Raises:
        ScheduleError: the schedule cannot be carried out; the message names rank and action.
    """
    _check_lists(schedule)
    _check_stages(schedule)
    _Play(schedule, outbox=outbox, gradient_first=gradient_first).run()
    if max_staleness is not None:
        _check_staleness(schedule, max_staleness)


def _check_lists(schedule: Schedule) -> None:
    """Checks that each rank runs a minibatch's forward, backward and update in order, once each."""
    plan = schedule.plan
    for rank, actions in enumerate(schedule.actions):
        begun: set[Part] = set()
        ended: set[Part] = set()
        updates = 0
        for action in actions:
            part = (action.number, action.microbatch)
            if action.kind == "U":
                if action.number != updates:
                    remedy = "number each rank's updates 0, 1, 2, ... in order"
                    raise _wrong(rank, action, f"appears where U{updates} is expected", remedy)
                updates += 1
                continue
            owner = plan.rank_for(plan.stage_of(rank), action.turn)
            if rank != owner:
                remedy = "give a stage's minibatches or microbatches to its replicas in turn"
                raise _wrong(rank, action, f"belongs to rank {owner}", remedy)
            if action.kind == "F":
                if part in begun:
                    raise _wrong(rank, action, "runs twice", _ORDER)
                begun.add(part)
            else:
                if part not in begun or part in ended:
                    raise _wrong(rank, action, "has no forward of its own before it", _ORDER)
                ended.add(part)
                last = _own_update(plan, rank, action)
                if last < updates:
                    raise _wrong(rank, action, f"comes after its update U{last}", _ORDER)
        for part in begun - ended:
            raise _wrong(rank, Action("F", *part), "has no backward", _ORDER)


def _check_stages(schedule: Schedule) -> None:
    """Checks that every stage runs every minibatch and makes one update for each round."""
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
            remedy="split all minibatches or none",
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
            updates = sum(action.kind == "U" for action in schedule.actions[rank])
            if updates < rounds:
                remedy = "give each rank an update for every round, even one without a minibatch"
                raise _wrong(rank, Action("U", updates), "is missing", remedy)
            if updates > rounds:
                fault = f"follows the updates of all rounds, {rounds} in all"
                raise _wrong(rank, Action("U", rounds), fault, "leave it out")


def _steps(schedule: Schedule, rank: int, *, gradient_first: bool) -> Iterator[_Step]:
    """Yields, in order, the messages that a rank takes and puts, and its meetings for updates."""
    plan = schedule.plan
    stage = plan.stage_of(rank)
    held: list[_Step] = []  # gradients that are sent after the next update
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


class _Play:
    """Lets every rank proceed as far as it can, until all have finished. See :func:`check`."""

    def __init__(self, schedule: Schedule, *, outbox: int | None, gradient_first: bool) -> None:
        self._plan, self._outbox = schedule.plan, outbox
        ranks = range(self._plan.num_ranks)
        self._todo = [
            deque(_steps(schedule, rank, gradient_first=gradient_first)) for rank in ranks
        ]
        self._channels: dict[tuple[int, int, str], deque[Part]] = defaultdict(deque)
        self._ready = deque(ranks)  # ranks that may be able to proceed
        self._queued = set(ranks)  # the same, to look up
        self._new = set(ranks)  # ranks at a step that was not examined yet

    def run(self) -> None:
        """Returns when all ranks have finished; raises an error for ranks that cannot."""
        while self._ready:
            rank = self._ready.popleft()
            self._queued.discard(rank)
            self._go_on(rank)
        if any(self._todo):
            raise _deadlock(self._todo)

    def _go_on(self, rank: int) -> None:
        steps = self._todo[rank]
        while steps and self._may_go(rank, steps[0]):
            step = steps[0]
            if step.what == "meet":
                for other in self._plan.ranks_of(self._plan.stage_of(rank)):
                    self._todo[other].popleft()
                    self._new.add(other)
                    self._wake(other)
                continue
            steps.popleft()
            self._new.add(rank)
            if step.what == "put":
                self._channel(rank, step).append(step.part)
            else:
                self._channel(rank, step).popleft()
            self._wake(step.peer)
        if rank in self._new and steps and steps[0].what == "take":
            self._wake(steps[0].peer)  # it may wait for this rank to take its message
        self._new.discard(rank)

    def _wake(self, rank: int) -> None:
        if rank not in self._queued:
            self._queued.add(rank)
            self._ready.append(rank)

    def _channel(self, rank: int, step: _Step) -> deque[Part]:
        ends = (rank, step.peer) if step.what == "put" else (step.peer, rank)
        return self._channels[(*ends, step.action.kind)]

    def _may_go(self, rank: int, step: _Step) -> bool:
        if step.what == "take":
            ready = self._channel(rank, step)
            if ready and ready[0] != step.part:
                name = Action(step.action.kind, *ready[0])
                remedy = "take messages in the order in which they are sent"
                raise _wrong(rank, step.action, f"gets the message of {name} first", remedy)
            return bool(ready)
        if step.what == "put":
            return self._has_room(rank, step)
        ranks = self._plan.ranks_of(self._plan.stage_of(rank))
        heads = [self._todo[r][0] if self._todo[r] else None for r in ranks]
        return all(h is not None and h.what == "meet" and h.part == step.part for h in heads)

    def _has_room(self, rank: int, step: _Step) -> bool:
        if self._outbox is None or len(self._channel(rank, step)) < self._outbox:
            return True
        # Without an outbox, the receiver must be waiting for just this message.
        there = self._todo[step.peer][0] if self._todo[step.peer] else None
        return (
            self._outbox == 0
            and there is not None
            and (there.what, there.peer, there.part) == ("take", rank, step.part)
            and there.action.kind == step.action.kind
        )


def _deadlock(todo: list[deque[_Step]]) -> ScheduleError:
    waits = {
        "take": "waits for rank {}",
        "put": "cannot send to rank {}",
        "meet": "waits for its stage's replicas",
    }
    stuck = [
        f"rank {rank} {waits[steps[0].what].format(steps[0].peer)} at {steps[0].action}"
        for rank, steps in enumerate(todo)
        if steps
    ]
    return ScheduleError(
        "deadlock: " + "; ".join(stuck),
        remedy="reorder the actions, send gradients before updates, or enlarge outbox",
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
                    fault = f"has a staleness of {stale}, but at most {bound} is allowed"
                    raise _wrong(rank, action, fault, "run this forward after more updates")


def _own_update(plan: Plan, rank: int, action: Action) -> int:
    """The number of the update that applies the gradient of a forward's or backward's minibatch."""
    if action.microbatch is not None:
        return action.number
    return action.number // plan.replicas(plan.stage_of(rank))


def _wrong(rank: int, action: Action, what: str, remedy: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}: {action} {what}", remedy=remedy)
