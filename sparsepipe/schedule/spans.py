"""A span of time: what a rank does, or a message on its way, from one time to another."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Self

from sparsepipe.schedule.actions import Action
from sparsepipe.schedule.plan import Plan

ACTIONS = {"F": "forward", "B": "backward", "U": "update"}
"""Names of the kinds of actions."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank does from one time to another, planned, simulated or measured.

    Attributes:
        rank: who computes, sends or waits; of a sum of gradients the first of its ranks.
        kind: F, B or U of an :class:`Action`; ``activation`` or ``gradient`` of a message on its
            way to ``target``; ``sum`` of a sum of gradients over the replicas of the rank's stage;
            anything else is a part of the rank's time beside its actions, such as ``loads``.
        number: minibatch, or the round of an update or a sum.
        microbatch: part of the minibatch, or of the gradients that are summed; None: it is whole.
        start: when it begins; seconds, or units of the times that it was computed from.
        end: when it ends, in the same unit.
        target: rank to which a message is sent.
        num_bytes: size of the message, or of each replica's gradients.
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
        """The span of an action."""
        return cls(rank, action.kind, action.number, action.microbatch, start=start, end=end)

    @property
    def is_action(self) -> bool:
        """Whether it is a forward, a backward or an update."""
        return self.kind in ACTIONS

    @property
    def action(self) -> Action:
        """The action that it is."""
        assert self.is_action, self
        return Action(self.kind, self.number, self.microbatch)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """A short name, such as F3, B3.1, or loads."""
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
