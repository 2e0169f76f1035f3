"""Where a run stands at a time: whether it stands there again later, and what follows from that.

A run has no memory but for this. Once it stands as it stood a while before, only some minibatches
on, all that has happened since then happens again and again, until no more minibatches come.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule import Intake

EQUAL = 1e-9
"""Of a cycle: times that differ by less are taken to be the same."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A run when the first rank has done an update.

    Attributes:
        number: of the first minibatch of that update.
        time_s: when it was done.
        places: what every rank does or waits for, and which messages and sums are where, by
            minibatches counted from ``number``.
        ends_s: when each thing under way ends, counted from ``time_s``.
        busy_s: that each rank has computed so far.
    """

    number: int
    time_s: float
    places: tuple[object, ...]
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    def repeats(self, earlier: Standing) -> bool:
        """Whether the run stands as it did before, but for the time and the minibatches."""
        slack_s = EQUAL * (self.time_s - earlier.time_s)
        return self.places == earlier.places and all(
            abs(now_s - then_s) <= slack_s
            for now_s, then_s in zip(self.ends_s, earlier.ends_s, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What repeats itself.

    Attributes:
        minibatches: after which all stands as before.
        seconds: the same.
        busy: of each rank, the share of this time in which it computes.
    """

    minibatches: int
    seconds: float
    busy: tuple[float, ...]


class Lookout:
    """Looks for a cycle while a run goes on, and cuts the run short when it has found one.

    Times of the first rank's updates say when to look: when the last of them repeat. Then all
    must stand as it did a cycle before. The run is left with as many minibatches as some rank
    knows of already, and some more so that it ends at the same place of the cycle as it would.

    Args:
        intake: of the run.
        period: minibatches after which all ranks do the same again.

    Attributes:
        cycle: that was found.
    """

    def __init__(self, intake: Intake, period: int) -> None:
        self._intake, self._period = intake, period
        self._ends_s: list[float] = []  # of each period
        self._next = 3  # periods after which to look
        self._cycle = 0  # minibatches after which all may stand as before
        self._first: Standing | None = None  # where it stood then
        self._wanted: int | None = None  # minibatch after whose update to look
        self.cycle: Cycle | None = None

    def wants(self, number: int, time_s: float) -> bool:
        """Whether to look now; asked after each update of the first rank.

        Args:
            number: of the update's first minibatch. All before it are back from all stages, so
                that from the second period on no rank is filling.
            time_s: now.
        """
        if self.cycle is not None or number % self._period:
            return False
        self._ends_s.append(time_s)
        if self._wanted is None and len(self._ends_s) >= self._next:
            periods = cycle_of(self._ends_s)
            if periods is None:
                self._wait()
            else:
                self._wanted, self._cycle = number, periods * self._period
        return number == self._wanted

    def sees(self, standing: Standing) -> None:
        """Is told where the run stands, when that is wanted."""
        if self._first is None:
            self._first, self._wanted = standing, standing.number + self._cycle
        elif standing.repeats(self._first):
            self._found(self._first, standing)
        else:
            self._first = self._wanted = None
            self._wait()

    def _wait(self) -> None:
        self._next = len(self._ends_s) + max(1, len(self._ends_s) // 16)

    def _found(self, first: Standing, second: Standing) -> None:
        seconds = second.time_s - first.time_s
        busy_s = zip(second.busy_s, first.busy_s, strict=True)
        self.cycle = Cycle(
            minibatches=self._cycle,
            seconds=seconds,
            busy=tuple(min(1.0, (b - a) / seconds) if seconds else 0.0 for b, a in busy_s),
        )
        told = self._intake.told
        self._intake.limit = told + (self._intake.limit - told) % self._cycle


def cycle_of(ends_s: list[float]) -> int | None:
    """After how many periods times seem to repeat at the end of a run; None if they do not.

    Args:
        ends_s: of each period.
    """
    last = len(ends_s) - 1
    for cycle in range(1, last // 2 + 1):
        took_s = ends_s[last] - ends_s[last - cycle]
        slack_s = EQUAL * took_s
        if all(
            abs(ends_s[k] - ends_s[k - cycle] - took_s) <= slack_s
            for k in range(last - 1, last - 1 - cycle, -1)
        ):
            return cycle
    return None
