"""Who talks to whom: the channels that a plan needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.runtime.transport.message import Kind
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True)
class Route:
    """One channel: messages of one kind from one rank to another.

    Where there are two stages, a batch's rest has no channel: it travels with the
    activation.
    """

    kind: Kind
    source: int
    target: int

    def other(self, rank: int) -> int:
        """The rank at the other end."""
        return self.target if rank == self.source else self.source

    def among(self, ranks: Sequence[int]) -> Route:
        """The same channel where the plan's ranks are these."""
        return Route(self.kind, ranks[self.source], ranks[self.target])


def routes(plan: Plan) -> tuple[Route, ...]:
    """All channels of a plan, in the order in which every rank must make their groups."""
    found: list[Route] = []
    for stage in range(plan.num_stages - 1):
        for upper, lower in plan.peers(stage, stage + 1):
            found.append(Route(Kind.ACTIVATION, upper, lower))
            found.append(Route(Kind.GRADIENT, lower, upper))
    if plan.num_stages > 1:
        for first, last in plan.peers(0, plan.num_stages - 1):
            found.append(Route(Kind.REPLY, last, first))
            if not shares_messages(plan):
                found.append(Route(Kind.BATCH, first, last))
    return tuple(found)


def shares_messages(plan: Plan) -> bool:
    """Whether a batch's rest goes the same way as the activation, hence in one message."""
    return plan.num_stages == 2


def default_depth(plan: Plan, route: Route) -> int:
    """Messages that a channel holds before its sender waits, if its owner wants no other number.

    In the asynchronous schedule a stage has at most warm-up + 1 minibatches in flight, so between
    two stages no more messages than the upper one's can be under way: in its training a send never
    waits for another stage, and memory is bounded by the schedule. Where there is no gradient to
    wait for (evaluation, of any pipeline), the depth is what holds a fast stage back.
    """
    upper = min(plan.stage_of(route.source), plan.stage_of(route.target))
    return plan.warmup(upper) + 1
