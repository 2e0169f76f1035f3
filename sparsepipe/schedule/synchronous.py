"""Synchronous schedules: all of a minibatch's gradients are in before the one update.

A minibatch is split into microbatches, which are handed round the replicas of a stage as
minibatches are in the asynchronous schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from sparsepipe.schedule.actions import Action, MinibatchSupply, Schedule
from sparsepipe.schedule.plan import Plan
from sparsepipe.utils.extensions import by_name

WARMUPS = {"1f1b": 1, "eager_1f1b": 2}
"""Warm-ups of schedules of one forward, one backward, as multiples of the asynchronous one's."""


def naive(plan: Plan, minibatches: int) -> Schedule:
    """Naive model parallelism: one minibatch after the other, one stage at a time.

    Where a stage has replicas, each round of its minibatches is under way at a time.
    """
    return _of(plan, lambda rank: naive_order(plan, rank, MinibatchSupply(minibatches)))


def naive_order(plan: Plan, rank: int, supply: MinibatchSupply) -> Iterator[Action]:
    """Actions of one rank in :func:`naive`, generated one at a time."""
    stage, replica = plan.stage_of(rank), plan.replica_of(rank)
    replicas = plan.replicas(stage)
    for number, count in enumerate(supply.portions(replicas)):
        if replica < count:
            yield Action("F", number * replicas + replica)
            yield Action("B", number * replicas + replica)
        yield Action("U", number)


def gpipe(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """GPipe (Huang et al., section 2.2): all forwards, then all backwards, then the update.

    Backwards run in the reverse order of forwards.
    """
    return synchronous_by_name("gpipe", plan, minibatches, microbatches=microbatches)


def gpipe_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Actions of one rank in :func:`gpipe`, generated one at a time."""
    parts = plan.microbatches_of(rank, microbatches)
    for minibatch, _ in enumerate(supply.portions(1)):
        yield from (Action("F", minibatch, part) for part in parts)
        yield from (Action("B", minibatch, part) for part in reversed(parts))
        yield Action("U", minibatch)


def one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """1F1B with flush (PipeDream-Flush): GPipe's update, with fewer microbatches in flight.

    The warm-up is that of the asynchronous schedule; then one forward, one backward, until
    the minibatch has drained and the update comes.
    """
    return synchronous_by_name("1f1b", plan, minibatches, microbatches=microbatches)


def one_f_one_b_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Actions of one rank in :func:`one_f_one_b`, generated one at a time."""
    return _in_turn(plan, rank, supply, microbatches, warmups=WARMUPS["1f1b"])


def eager_one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """Eager 1F1B (Zhuang et al., "On Optimizing the Communication of Model Parallelism").

    1F1B with flush whose warm-up is twice as long: 2 w + 1 microbatches are in flight where 1F1B
    has w + 1, w being :meth:`Plan.warmup`. Of K stages that take equally long, 1F1B loses the time
    of 2 (K - 1)/K messages for each microbatch: the first stage begins microbatch m + K after the
    backward of m, whose way to the last stage and back is 2 (K - 1) messages. Eager 1F1B loses
    nothing as long as a message takes no more than half of a microbatch's time in a stage.
    """
    return synchronous_by_name("eager_1f1b", plan, minibatches, microbatches=microbatches)


def eager_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Actions of one rank in :func:`eager_one_f_one_b`, generated one at a time."""
    return _in_turn(plan, rank, supply, microbatches, warmups=WARMUPS["eager_1f1b"])


MicrobatchOrder = Callable[[Plan, int, MinibatchSupply, int], Iterator[Action]]
"""Actions of one rank of a plan with a number of microbatches, generated one at a time."""

SYNCHRONOUS: Mapping[str, MicrobatchOrder] = MappingProxyType(
    {"gpipe": gpipe_order, "1f1b": one_f_one_b_order, "eager_1f1b": eager_order}
)
"""Schedules that cut minibatches into microbatches, by their names."""


def order_by_name(name: str) -> MicrobatchOrder:
    """One of :data:`SYNCHRONOUS`, or another package's by its dotted path.

    Of theirs all microbatches of a device are taken to be in flight at once, where memory counts.

    Args:
        name: of the schedule, or its dotted path.

    Raises:
        ConfigError: the schedule is unknown.
    """
    return by_name(name, SYNCHRONOUS, kind="synchronous schedule")


def synchronous_by_name(name: str, plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """A synchronous schedule, see :func:`order_by_name`."""
    order = order_by_name(name)
    return _of(plan, lambda rank: order(plan, rank, MinibatchSupply(minibatches), microbatches))


def _in_turn(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int, *, warmups: int
) -> Iterator[Action]:
    """One forward, one backward, after the forwards of the warm-up."""
    parts = plan.microbatches_of(rank, microbatches)
    ahead = warmups * plan.warmup(plan.stage_of(rank))
    for minibatch, _ in enumerate(supply.portions(1)):
        for place, part in enumerate(parts):
            yield Action("F", minibatch, part)
            if place >= ahead:
                yield Action("B", minibatch, parts[place - ahead])
        yield from (Action("B", minibatch, part) for part in parts[max(0, len(parts) - ahead) :])
        yield Action("U", minibatch)


def _of(plan: Plan, order: Callable[[int], Iterator[Action]]) -> Schedule:
    return Schedule(plan, tuple(tuple(order(rank)) for rank in range(plan.num_ranks)))
