"""A schedule is data: each rank's ordered list of actions.

Sends, receives and sums are not listed, since the plan implies them: a forward takes the
activation of the same minibatch from the stage before, a backward takes the gradient from the stage
after, and an update waits for all replicas of its stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule.plan import Plan

Kind = Literal["F", "B", "U"]

_ACTION = re.compile(r"(?!U\d+\.)([FBU])(\d+)(?:\.(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """A forward, a backward or an update of a rank.

    Args:
        kind: ``F`` forward, ``B`` backward, ``U`` update.
        number: number of the minibatch, from 0; for an update, number of the round. A round is one
            minibatch if minibatches are split into microbatches, else one minibatch for each
            replica of the stage.
        microbatch: number of the microbatch, from 0; None if minibatches are not split.
    """

    kind: Kind
    number: int
    microbatch: int | None = None

    def __str__(self) -> str:
        part = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind}{self.number}{part}"

    @property
    def turn(self) -> int:
        """Number of the microbatch, or of an unsplit minibatch, by which replicas take turns."""
        return self.number if self.microbatch is None else self.microbatch

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an action such as ``F3``, ``B1``, ``U1`` or, with a microbatch, ``F3.2``."""
        match = _ACTION.fullmatch(text)
        if match is None:
            remedy = "write an action such as F3, B1, U1 or F3.2"
            raise ScheduleError(f"{text!r} is not a valid action", remedy=remedy)
        kind, number, part = match.groups()
        return cls(kind, int(number), None if part is None else int(part))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank of a plan, in order.

    Args:
        plan: the stages and their ranks.
        actions: for each rank, its actions in the order in which it runs them.

    Raises:
        ScheduleError: ``actions`` does not have one entry for each rank.
    """

    plan: Plan
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.actions) != self.plan.num_ranks:
            raise ScheduleError(
                f"the schedule has {len(self.actions)} lists of actions, but the plan has "
                f"{self.plan.num_ranks} ranks",
                remedy="give one list for each rank of the plan",
            )

    def text(self) -> str:
        """The schedule as text with a line for each rank, which :meth:`parse` reads back."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions) + "\n"

    @classmethod
    def parse(cls, plan: Plan, text: str) -> Self:
        """Reads one line of actions for each rank; text after a # is a comment."""
        lines = [line.split("#")[0].split() for line in text.strip().splitlines()]
        return cls(plan, tuple(tuple(map(Action.parse, line)) for line in lines))


class MinibatchSupply:
    """Tells the ranks of a run how many more minibatches come.

    Ranks ask for a few minibatches at a time, so that no list of all actions is needed and the run
    can be shortened while it is under way.

    Args:
        minibatches: number of minibatches of the run.

    Attributes:
        limit: number of minibatches of the run; it may be lowered, but not below ``announced``.
        announced: number of minibatches that have been announced to at least one rank.
    """

    __slots__ = ("announced", "limit")

    def __init__(self, minibatches: int) -> None:
        self.limit = minibatches
        self.announced = 0

    def portions(self, size: int) -> Iterator[int]:
        """Yields how many minibatches come next for one rank: ``size`` each time, then the rest."""
        come = 0
        while come < self.limit:
            count = min(size, self.limit - come)
            come += count
            self.announced = max(self.announced, come)
            yield count
