"""Messages between stages, and the channels that a plan needs for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sparsepipe.schedule import Plan


class Kind(Enum):
    """The kind of a message; the value is its name in error messages."""

    ACTIVATION = "activation"
    """Downstream, to the next stage: its input."""
    GRADIENT = "gradient"
    """Upstream, to the previous stage: gradients of what it sent."""
    BATCH = "batch"
    """From stage 0 straight to the last stage: the batch without the input."""
    REPLY = "reply"
    """From the last stage straight to stage 0: the result for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One minibatch's tensors with a few values beside them.

    Attributes:
        meta: small plain Python values (versions, losses, logged values); they travel in
            the header.
        tree: a pytree of tensors and plain values: tuples, lists, dicts, ``SparseTensor``
            and every other registered node, in any nesting. Other objects (a dataclass, for
            example) are pickled, their tensors sent beside them.
    """

    minibatch: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    tree: Any = None


def message_name(number: int, *, parts: int | None = None) -> str:
    """How errors call a message's minibatch, or its part where minibatches have ``parts``."""
    if parts is None:
        return f"minibatch {number}"
    return f"microbatch {number % parts} of minibatch {number // parts}"


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Counts of the messages of one kind that were sent.

    Attributes:
        messages: how many; a batch's rest that travels with an activation counts as one.
        payload_bytes: of the tensors, each once.
        overhead_bytes: of the headers: structure, dtypes, shapes and ``meta``, and what pads
            the first block to its fixed size. Framing by gloo and TCP is not counted. The
            header of a shared message counts for the activation.
    """

    messages: int = 0
    payload_bytes: int = 0
    overhead_bytes: int = 0


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
    """Messages that a channel holds before its sender waits, by default.

    In the asynchronous schedule a stage has at most warm-up + 1 minibatches in flight, so between
    two stages no more messages than the upper one's can be under way: in its training a send never
    waits for another stage, and memory is bounded by the schedule. Where there is no gradient to
    wait for (evaluation, of any pipeline), the depth is what holds a fast stage back.
    """
    upper = min(plan.stage_of(route.source), plan.stage_of(route.target))
    return plan.warmup(upper) + 1
