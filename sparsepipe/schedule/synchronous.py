"""Synchronous schedules: an update follows only when all gradients of its minibatch are complete.

A minibatch is split into microbatches, which the replicas of a stage take in turn, as they take
minibatches in the asynchronous schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from sparsepipe.schedule.actions import Action, MinibatchSupply, Schedule
from sparsepipe.schedule.plan import Plan
from sparsepipe.utils.extensions import by_name

WARMUPS = {"1f1b": 1, "eager_1f1b": 2}
"""Length of the warm-up as a multiple of :meth:`Plan.warmup`, by name of the schedule."""


def naive(plan: Plan, minibatches: int) -> Schedule:
    """Naive model parallelism: one minibatch after the other, one stage at a time.

    Each replica of a stage runs one minibatch before each update; in the last round, one or none.
    """
    return _of(plan, lambda rank: naive_order(plan, rank, MinibatchSupply(minibatches)))


def naive_order(plan: Plan, rank: int, supply: MinibatchSupply) -> Iterator[Action]:
    """Yields the actions of ``rank`` in :func:`naive` for the minibatches of ``supply``."""
    stage, replica = plan.stage_of(rank), plan.replica_of(rank)
    replicas = plan.replicas(stage)
    for number, count in enumerate(supply.portions(replicas)):
        if replica < count:
            yield Action("F", number * replicas + replica)
            yield Action("B", number * replicas + replica)
        yield Action("U", number)


def gpipe(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """GPipe (Huang et al., section 2.2): all forwards, then all backwards, then the update.

    The backwards of the microbatches run in the reverse order of their forwards.
    """
    return synchronous_by_name("gpipe", plan, minibatches, microbatches=microbatches)


def gpipe_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Yields the actions of ``rank`` in :func:`gpipe` for the minibatches of ``supply``."""
    parts = plan.microbatches_of(rank, microbatches)
    for minibatch, _ in enumerate(supply.portions(1)):
        yield from (Action("F", minibatch, part) for part in parts)
        yield from (Action("B", minibatch, part) for part in reversed(parts))
        yield Action("U", minibatch)


def one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """1F1B with flush (PipeDream-Flush): the updates of GPipe, with fewer microbatches in flight.

    After the warm-up, which is that of the asynchronous schedule, forwards and backwards take turns
    until the backwards of all microbatches have run; then the update follows.
    """
    return synchronous_by_name("1f1b", plan, minibatches, microbatches=microbatches)


def one_f_one_b_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Yields the actions of ``rank`` in :func:`one_f_one_b` for the minibatches of ``supply``."""
    return _in_turn(plan, rank, supply, microbatches, warmups=WARMUPS["1f1b"])


def eager_one_f_one_b(plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """Eager 1F1B (Zhuang et al., "On Optimizing the Communication of Model Parallelism").

    1F1B with flush whose warm-up is twice as long: 2 w + 1 microbatches are in flight where 1F1B
    has w + 1, w being :meth:`Plan.warmup`. With K stages that take equally long, 1F1B loses the
    time of 2 (K - 1)/K messages for each microbatch: the first stage begins microbatch m + K after
    the backward of m, whose way to the last stage and back takes 2 (K - 1) messages. Eager 1F1B
    loses nothing as long as a message takes at most half of a microbatch's time in a stage.
    """
    return synchronous_by_name("eager_1f1b", plan, minibatches, microbatches=microbatches)


def eager_order(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int
) -> Iterator[Action]:
    """Yields the actions of ``rank`` in :func:`eager_one_f_one_b` for ``supply``'s minibatches."""
    return _in_turn(plan, rank, supply, microbatches, warmups=WARMUPS["eager_1f1b"])


MicrobatchOrder = Callable[[Plan, int, MinibatchSupply, int], Iterator[Action]]
"""Yields a rank's actions, given the plan, the rank, the supply and the number of microbatches."""

SYNCHRONOUS: Mapping[str, MicrobatchOrder] = MappingProxyType(
    {"gpipe": gpipe_order, "1f1b": one_f_one_b_order, "eager_1f1b": eager_order}
)
"""Functions that yield a rank's actions, by the name of the schedule."""


def order_by_name(name: str) -> MicrobatchOrder:
    """The function that yields a rank's actions in the schedule ``name``.

    For schedules of other packages, memory limits assume that all microbatches of a device are in
    flight at once.

    Args:
        name: a name in :data:`SYNCHRONOUS`, or the dotted path of a function of another package.

    Raises:
        ConfigError: the schedule is unknown.
    """
    return by_name(name, SYNCHRONOUS, kind="synchronous schedule")


def synchronous_by_name(name: str, plan: Plan, minibatches: int, *, microbatches: int) -> Schedule:
    """The schedule ``name`` (see :func:`order_by_name`) of a run of ``minibatches``, each cut into
    ``microbatches`` microbatches.
    """
    order = order_by_name(name)
    return _of(plan, lambda rank: order(plan, rank, MinibatchSupply(minibatches), microbatches))


def _in_turn(
    plan: Plan, rank: int, supply: MinibatchSupply, microbatches: int, *, warmups: int
) -> Iterator[Action]:
    """Yields the actions of 1F1B with a warm-up of ``warmups`` times :meth:`Plan.warmup`."""
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
