"""The asynchronous 1F1B schedule, in which no minibatch waits for the updates of those before it.

A replica of stage ``s`` runs ``w_s`` forwards (:meth:`Plan.warmup`) ahead of its first backward,
then forwards and backwards in turn (PipeDream, section 3.2), and updates its weights after every
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from sparsepipe.schedule.actions import Action, Kind, MinibatchSupply, Schedule
from sparsepipe.schedule.plan import Plan


@lru_cache(maxsize=2**14)
def _action(kind: Kind, number: int) -> Action:
    return Action(kind, number)


class RankOrder:
    """Generates the actions of one rank as minibatches enter the pipeline.

    The order of actions does not depend on how many minibatches will come, except at the end, where
    the pipeline drains. Minibatches and updates are numbered from 0 after every drain.

    Attributes:
        minibatches: number that entered the pipeline since the last drain, over all replicas.
        updates: number of this rank's updates since the last drain, before the current action.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        stage = plan.stage_of(rank)
        self._replica = plan.replica_of(rank)
        self._replicas = plan.replicas(stage)
        self._readers = plan.replicas(0)
        self._warmup = plan.warmup(stage)
        self.minibatches = 0
        self._forwards = 0  # of this rank since the last drain
        self.updates = 0

    def ahead(self, minibatch: int) -> int:
        """Number of updates to come before that of ``minibatch``; at its forward, its staleness."""
        return minibatch // self._replicas - self.updates

    def following(self, minibatch: int) -> int:
        """Number of this rank's next minibatch after ``minibatch``; the run may end before it."""
        return minibatch + self._replicas

    def first_of(self, update: int) -> int:
        """Number of the first minibatch whose gradient ``update`` applies."""
        return update * self._replicas

    def step_of(self, update: int) -> int:
        """The index of the training step to which ``update`` belongs.

        A step is a round of stage 0. It is the one whose minibatch replica 0 of this stage sends
        forward last before ``update``, even if other replicas update in another round. As long as
        minibatches are fed, the result may grow; it is final once a rank runs the update.
        """
        forward = (self._warmup + update) * self._replicas
        return min(forward, self.minibatches - 1) // self._readers

    def feed(self, count: int = 1) -> Iterator[Action]:
        """Yields the actions of this rank when ``count`` more minibatches enter the pipeline.

        The generator must be exhausted before the next call.
        """
        end = self.minibatches + count
        first = self.minibatches + (self._replica - self.minibatches) % self._replicas
        for minibatch in range(first, end, self._replicas):
            self.minibatches = minibatch + 1
            yield _action("F", minibatch)
            self._forwards += 1
            if self._forwards > self._warmup:
                yield from self._finish_round()
        self.minibatches = end

    def drain(self) -> Iterator[Action]:
        """Yields the remaining actions if no more minibatches come; then numbers restart at 0.

        Replicas without a minibatch in the last round take part in its update, too.
        """
        while self.updates * self._replicas < self.minibatches:
            yield from self._finish_round()
        self.minibatches = self._forwards = self.updates = 0

    def _finish_round(self) -> Iterator[Action]:
        """Yields this rank's backward in the oldest unfinished round, if any, and the update."""
        minibatch = self.updates * self._replicas + self._replica
        if minibatch < self.minibatches:
            yield _action("B", minibatch)
        yield _action("U", self.updates)
        self.updates += 1


def asynchronous(plan: Plan, minibatches: int) -> Schedule:
    """The asynchronous 1F1B schedule of a run of ``minibatches``, with a drain at the end."""
    ranks = range(plan.num_ranks)
    orders = (asynchronous_order(plan, rank, MinibatchSupply(minibatches)) for rank in ranks)
    return Schedule(plan, tuple(map(tuple, orders)))


def asynchronous_order(plan: Plan, rank: int, supply: MinibatchSupply) -> Iterator[Action]:
    """Yields the actions of ``rank`` in :func:`asynchronous` for the minibatches of ``supply``."""
    order = RankOrder(plan, rank)
    for count in supply.portions(plan.replicas(plan.stage_of(rank))):
        yield from order.feed(count)
    yield from order.drain()


def steady_rounds(rounds: int, *, ahead: int) -> tuple[int, int] | None:
    """Numbers of the two rounds at whose ends the steady part of a run begins and ends.

    The steady part is the second half of the run, or less if the pipeline takes longer to fill,
    without the last round, in which the pipeline drains. None if nothing is left.

    Args:
        rounds: number of rounds of the first stage, from one drain to the next.
        ahead: number of rounds whose forwards the first stage runs before its first backward: its
            :meth:`Plan.warmup`.
    """
    first, last = max(rounds // 2, ahead + 1), rounds - 2
    return (first, last) if last > first else None
