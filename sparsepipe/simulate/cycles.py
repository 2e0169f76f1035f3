"""Recognises that a run repeats itself, so that the rest of it need not be simulated.

What a run does next follows from its state: what each rank does or waits for, and where each
message and each sum is. If it has the same state twice, some minibatches apart, all that happened
in between happens again and again, until no more minibatches come.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule import MinibatchSupply

EQUAL = 1e-9
"""Share of a cycle by which times may differ and count as equal."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run as the first rank begins an update.

    Attributes:
        number: of the first minibatch of that update.
        places: what each rank does or waits for, and which messages and sums are where.
            Minibatches are counted from ``number``, so that two states can be compared.
        ends_s: of each thing under way, how long after ``time_s`` it ends.
        busy_s: that each rank has computed so far.
    """

    number: int
    time_s: float
    places: tuple[object, ...]
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    def repeats(self, earlier: RunState) -> bool:
        """Whether the run has the state that it had then, some minibatches on."""
        slack_s = EQUAL * (self.time_s - earlier.time_s)
        return self.places == earlier.places and all(
            abs(now_s - then_s) <= slack_s
            for now_s, then_s in zip(self.ends_s, earlier.ends_s, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The part of a run that repeats.

    Attributes:
        minibatches: that pass until the run has the same state again.
        seconds: that this takes.
        busy: of each rank, the share of this time in which it computes.
    """

    minibatches: int
    seconds: float
    busy: tuple[float, ...]


class CycleDetector:
    """Looks for a cycle while a run goes on, and cuts the run short when it has found one.

    The state of a run takes time to find out. So the detector first compares the times of the first
    rank's updates. When the last of them repeat, it requests the state, and again a cycle later. If
    both are the same, the cycle is found.

    Then the run is cut short. Minibatches that some rank knows of stay, and of the others as many
    as are left when whole cycles of them are taken out.

    Args:
        supply: hands minibatches to the ranks.
        period: minibatches after which each rank's order of actions repeats itself.

    Attributes:
        cycle: that was found; None: none yet.
    """

    def __init__(self, supply: MinibatchSupply, period: int) -> None:
        self._supply, self._period = supply, period
        self._begins_s: list[float] = []  # of the first rank's update, once a period
        self._next = 3  # periods after which to look
        self._cycle = 0  # minibatches after which the times of updates repeat
        self._first: RunState | None = None  # where the run stood when it was looked at first
        self._due: int | None = None  # minibatch at whose update the state is needed
        self.cycle: Cycle | None = None

    def needs_state(self, number: int, time_s: float) -> bool:
        """Whether to look now; called as each update of the first rank begins.

        Ranks begin with forwards only, so that the state before each of them has done a
        backward does not recur. The third period is late enough: each rank has a
        minibatch in every period, and when the first rank updates, those before are back from all
        stages.
        """
        if self.cycle is not None or number % self._period:
            return False
        self._begins_s.append(time_s)
        if self._due is None and len(self._begins_s) >= self._next:
            periods = cycle_of(self._begins_s)
            if periods is None:
                self._wait()
            else:
                self._due, self._cycle = number, periods * self._period
        return number == self._due

    def add_state(self, state: RunState) -> None:
        """Takes the state of the run, if :meth:`needs_state` returned true."""
        if self._first is None:
            self._first, self._due = state, state.number + self._cycle
        elif state.repeats(self._first):
            self._found(self._first, state)
        else:
            self._first = self._due = None
            self._wait()

    def _wait(self) -> None:
        self._next = len(self._begins_s) + max(1, len(self._begins_s) // 16)

    def _found(self, first: RunState, second: RunState) -> None:
        seconds = second.time_s - first.time_s
        busy_s = zip(second.busy_s, first.busy_s, strict=True)
        self.cycle = Cycle(
            minibatches=self._cycle,
            seconds=seconds,
            busy=tuple(min(1.0, (b - a) / seconds) if seconds else 0.0 for b, a in busy_s),
        )
        announced = self._supply.announced
        self._supply.limit = announced + (self._supply.limit - announced) % self._cycle


def cycle_of(times_s: list[float]) -> int | None:
    """After how many steps the steps from time to time repeat, at the end; None: they do not."""
    last = len(times_s) - 1
    for cycle in range(1, last // 2 + 1):
        took_s = times_s[last] - times_s[last - cycle]
        slack_s = EQUAL * took_s
        if all(
            abs(times_s[k] - times_s[k - cycle] - took_s) <= slack_s
            for k in range(last - 1, last - 1 - cycle, -1)
        ):
            return cycle
    return None
