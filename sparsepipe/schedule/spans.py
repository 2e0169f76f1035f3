"""Spans of time in which a rank does something, or a message is on its way."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Self

from sparsepipe.schedule.actions import Action
from sparsepipe.schedule.plan import Plan

ACTIONS = {"F": "forward", "B": "backward", "U": "update"}
"""Names of the kinds of actions."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does from ``start`` to ``end``, as planned, simulated or measured.

    Attributes:
        rank: the rank that computes, sends or waits; for a sum of gradients, the first rank that
            takes part.
        kind: F, B or U for an :class:`Action`; ``activation`` or ``gradient`` for a message on its
            way to ``target``; ``sum`` for a sum of gradients over the replicas of the rank's stage;
            anything else is something the rank does besides its actions, such as ``loads``.
        number: number of the minibatch; for an update or a sum, of its round.
        microbatch: number of the microbatch or, for a sum, of the part of the gradients; None if
            the minibatch or the gradients are not divided.
        start: time at the beginning, in seconds or in the unit of the costs.
        end: time at the end, in the same unit.
        target: the rank to which a message is sent; None: the span is not a message.
        num_bytes: size of a message, or of the gradients that one replica adds to a sum.
    """

    rank: int
    kind: str
    number: int | None = None
    microbatch: int | None = None
    _: KW_ONLY
    start: float
    end: float
    target: int | None = None
    num_bytes: float = 0.0

    @classmethod
    def of(cls, action: Action, rank: int, start: float, end: float) -> Self:
        """The span of an action that ``rank`` runs."""
        return cls(rank, action.kind, action.number, action.microbatch, start=start, end=end)

    @property
    def is_action(self) -> bool:
        """Whether the span is a forward, a backward or an update."""
        return self.kind in ACTIONS

    @property
    def action(self) -> Action:
        """The span as an action; it must be a forward, a backward or an update."""
        assert self.is_action, self
        return Action(self.kind, self.number, self.microbatch)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """A short name, such as F3, B3.1 or loads."""
        if self.number is None:
            return self.kind
        part = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind if self.is_action else self.kind[0]}{self.number}{part}"


def rank_title(plan: Plan, rank: int) -> str:
    """Name of a rank in drawings, such as ``stage 0, replica 1``."""
    stage = plan.stage_of(rank)
    if plan.replicas(stage) == 1:
        return f"stage {stage}"
    return f"stage {stage}, replica {plan.replica_of(rank)}"
