"""The asynchronous 1F1B schedule: minibatches follow one another without waiting.

A replica of stage ``s`` runs ``w_s`` forwards ahead of its first backward, then one forward,
one backward (PipeDream, section 3.2), and updates its weights after every backward.
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
    """The actions of one rank, generated as minibatches come.

    How many will come need not be known: the order of actions does not depend on it, but for the
    end, where the pipeline drains. Minibatches are numbered from 0 after every drain.

    Attributes:
        minibatches: minibatches that have come since the last drain, over all replicas.
        updates: updates that have been applied before the action that is running.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        stage = plan.stage_of(rank)
        self._replica = plan.replica_of(rank)
        self._replicas = plan.replicas(stage)
        self._readers = plan.replicas(0)
        self._warmup = plan.warmup(stage)
        self.minibatches = 0
        self._forwards = 0  # of this rank
        self.updates = 0

    def ahead(self, minibatch: int) -> int:
        """Updates still to come before a minibatch's own: its staleness, at its forward."""
        return minibatch // self._replicas - self.updates

    def following(self, minibatch: int) -> int:
        """The minibatch that this rank gets after one of its own, if it comes."""
        return minibatch + self._replicas

    def first_of(self, update: int) -> int:
        """The first of the minibatches whose gradients an update applies."""
        return update * self._replicas

    def step_of(self, update: int) -> int:
        """The round of stage 0 in which the first replica of this stage comes to an update.

        Replicas may come to the same update in different rounds. While a rank runs an update,
        that of the first one is known: the forward that brings it has come, or never will.
        """
        forward = (self._warmup + update) * self._replicas
        return min(forward, self.minibatches - 1) // self._readers

    def feed(self, count: int = 1) -> Iterator[Action]:
        """Actions of this rank when ``count`` more minibatches enter the pipeline.

        The generator must be run to its end before the next one.
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
        """Remaining actions when no more minibatches come; then numbering begins anew.

        Replicas without a minibatch in the last round take part in its update.
        """
        while self.updates * self._replicas < self.minibatches:
            yield from self._finish_round()
        self.minibatches = self._forwards = self.updates = 0

    def _finish_round(self) -> Iterator[Action]:
        """The backward of this rank's oldest minibatch, if it has one left, and its update."""
        minibatch = self.updates * self._replicas + self._replica
        if minibatch < self.minibatches:
            yield _action("B", minibatch)
        yield _action("U", self.updates)
        self.updates += 1


def asynchronous(plan: Plan, minibatches: int) -> Schedule:
    """The asynchronous 1F1B schedule of a number of minibatches, drained at the end."""
    ranks = range(plan.num_ranks)
    orders = (asynchronous_order(plan, rank, MinibatchSupply(minibatches)) for rank in ranks)
    return Schedule(plan, tuple(map(tuple, orders)))


def asynchronous_order(plan: Plan, rank: int, supply: MinibatchSupply) -> Iterator[Action]:
    """Actions of one rank, generated one at a time: a long run has many."""
    order = RankOrder(plan, rank)
    for count in supply.portions(plan.replicas(plan.stage_of(rank))):
        yield from order.feed(count)
    yield from order.drain()


def steady_rounds(rounds: int, *, ahead: int) -> tuple[int, int] | None:
    """The rounds after whose ends the steady part of a run begins and ends.

    It is the second half, or less where the pipeline takes longer to fill, without the last round,
    in which it drains. None where nothing is left.

    Args:
        rounds: of the first stage, from one drain to the next.
        ahead: rounds that this stage is ahead of its own backward passes, which it does without
            waiting for any: :meth:`Plan.warmup` of it.
    """
    first, last = max(rounds // 2, ahead + 1), rounds - 2
    return (first, last) if last > first else None
