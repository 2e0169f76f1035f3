"""A schedule is data: each rank's ordered list of actions.

Sends, receives and all-reduces are not listed, since the plan implies them: a forward takes
what the stage before made of the same minibatch, a backward what the stage behind did, and an
update waits for all replicas of its stage.
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
    """One thing a rank does.

    Args:
        kind: ``F`` forward, ``B`` backward, ``U`` update.
        number: the minibatch, from 0; of an update the round of minibatches that it applies,
            which is the minibatch where a stage has one replica.
        microbatch: the part of the minibatch, where it has parts.
    """

    kind: Kind
    number: int
    microbatch: int | None = None

    def __str__(self) -> str:
        part = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.kind}{self.number}{part}"

    @property
    def turn(self) -> int:
        """The number that determines its replica (:meth:`Plan.rank_for`)."""
        return self.number if self.microbatch is None else self.microbatch

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``F3``, ``B1``, ``U1`` or ``F3.2``."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is no action", remedy="write F3, B1, U1 or F3.2")
        kind, number, part = match.groups()
        return cls(kind, int(number), None if part is None else int(part))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank of a plan, in order.

    Args:
        plan: the stages and their ranks.
        actions: one tuple for each rank.

    Raises:
        ScheduleError: it is not one tuple for each rank.
    """

    plan: Plan
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.actions) != self.plan.num_ranks:
            raise ScheduleError(
                f"{len(self.actions)} lists of actions for {self.plan.num_ranks} ranks",
                remedy="give one for each rank of the plan",
            )

    def text(self) -> str:
        """One line for each rank; :meth:`parse` reads it back."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.actions) + "\n"

    @classmethod
    def parse(cls, plan: Plan, text: str) -> Self:
        """Reads one line of actions for each rank; what follows a # is a comment."""
        lines = [line.split("#")[0].split() for line in text.strip().splitlines()]
        return cls(plan, tuple(tuple(map(Action.parse, line)) for line in lines))


class MinibatchSupply:
    """The minibatches of one run, as its ranks learn of them.

    Ranks request them a few at a time, so that no list of all actions is needed, and the run can
    be shortened while it goes on.

    Args:
        minibatches: of the run.

    Attributes:
        limit: minibatches of the run; it may be lowered, not below ``announced``.
        announced: minibatches that some rank knows of.
    """

    __slots__ = ("announced", "limit")

    def __init__(self, minibatches: int) -> None:
        self.limit = minibatches
        self.announced = 0

    def portions(self, size: int) -> Iterator[int]:
        """Numbers of minibatches that come next for one rank: ``size`` each time, then the rest."""
        come = 0
        while come < self.limit:
            count = min(size, self.limit - come)
            come += count
            self.announced = max(self.announced, come)
            yield count
