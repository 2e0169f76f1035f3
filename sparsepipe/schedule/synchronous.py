"""Synchronous schedules: all of a minibatch's gradients are in before the one update.

A minibatch is split into microbatches, which are handed round the replicas of a stage as
minibatches are in the asynchronous schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sparsepipe.schedule.actions import Action, Schedule
from sparsepipe.schedule.intake import Intake
from sparsepipe.schedule.plan import Plan


def naive(plan: Plan, minibatches: int) -> Schedule:
    """Naive model parallelism: one minibatch after the other, one stage at a time.

    Where a stage has replicas, each round of its minibatches is under way at a time.
    """
    return _of(plan, lambda rank: naive_order(plan, rank, Intake(minibatches)))


def naive_order(plan: Plan, rank: int, intake: Intake) -> Iterator[Action]:
    """What one rank does in :func:`naive`, told as it is asked for."""
    stage, replica = plan.stage_of(rank), plan.replica_of(rank)
    replicas = plan.replicas(stage)
    for number, count in enumerate(intake.portions(replicas)):
        if replica < count:
            yield Action("F", number * replicas + replica)
            yield Action("B", number * replicas + replica)
        yield Action("U", number)


def gpipe(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """GPipe (Huang et al., section 2.2): all forwards, then all backwards, then the update.

    Backwards run in the reverse order of forwards.
    """
    return _of(plan, lambda rank: gpipe_order(plan, rank, Intake(minibatches), microbatches))


def gpipe_order(plan: Plan, rank: int, intake: Intake, microbatches: int) -> Iterator[Action]:
    """What one rank does in :func:`gpipe`, told as it is asked for."""
    parts = plan.microbatches_of(rank, microbatches)
    for minibatch, _ in enumerate(intake.portions(1)):
        yield from (Action("F", minibatch, part) for part in parts)
        yield from (Action("B", minibatch, part) for part in reversed(parts))
        yield Action("U", minibatch)


def one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """1F1B with flush (PipeDream-Flush): GPipe's update, with fewer microbatches in flight.

    The warm-up is that of the asynchronous schedule; then one forward, one backward, until
    the minibatch has drained and the update comes.
    """
    return _of(plan, lambda rank: one_f_one_b_order(plan, rank, Intake(minibatches), microbatches))


def one_f_one_b_order(plan: Plan, rank: int, intake: Intake, microbatches: int) -> Iterator[Action]:
    """What one rank does in :func:`one_f_one_b`, told as it is asked for."""
    ahead = plan.warmup(plan.stage_of(rank))
    return _in_turn(plan.microbatches_of(rank, microbatches), intake, ahead=ahead)


def eager_one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """Eager 1F1B (Zhuang et al., "On Optimizing the Communication of Model Parallelism").

    1F1B with flush whose warm-up is twice as long. In 1F1B a microbatch that a stage hands on is
    awaited already where neighbours take equally long, so that they lose the time of two messages
    for each microbatch. Here it is on its way while its receiver has another one to go on with,
    and more of them are in flight: 2 w + 1 where 1F1B has w + 1.
    """
    return _of(plan, lambda rank: eager_order(plan, rank, Intake(minibatches), microbatches))


def eager_order(plan: Plan, rank: int, intake: Intake, microbatches: int) -> Iterator[Action]:
    """What one rank does in :func:`eager_one_f_one_b`, told as it is asked for."""
    ahead = 2 * plan.warmup(plan.stage_of(rank))
    return _in_turn(plan.microbatches_of(rank, microbatches), intake, ahead=ahead)


def _in_turn(parts: Sequence[int], intake: Intake, *, ahead: int) -> Iterator[Action]:
    """One forward, one backward, after some forwards."""
    for minibatch, _ in enumerate(intake.portions(1)):
        for place, part in enumerate(parts):
            yield Action("F", minibatch, part)
            if place >= ahead:
                yield Action("B", minibatch, parts[place - ahead])
        yield from (Action("B", minibatch, part) for part in parts[max(0, len(parts) - ahead) :])
        yield Action("U", minibatch)


def _of(plan: Plan, order: Callable[[int], Iterator[Action]]) -> Schedule:
    return Schedule(plan, tuple(tuple(order(rank)) for rank in range(plan.num_ranks)))
