"""Recognises that a run repeats itself, so that the rest of it need not be simulated.

What a run does next follows from its state: what each rank does or waits for, and where each
message and each sum is. What happens between two equal states repeats until no minibatches come.
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
        number: first minibatch of that update.
        time_s: when it begins.
        places: what each rank does or waits for, and which messages and sums are where;
            minibatches are counted from ``number``.
        ends_s: seconds from ``time_s`` to the end of each action, message and sum under way.
        busy_s: seconds that each rank has computed so far.
    """

    number: int
    time_s: float
    places: tuple[object, ...]
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The part of a run that repeats.

    Attributes:
        minibatches: minibatches after which the run has the same state again.
        seconds: time that these take.
        busy: share of this time in which each rank computes.
    """

    minibatches: int
    seconds: float
    busy: tuple[float, ...]


class CycleDetector:
    """Looks for a cycle in a run, and leaves whole cycles out.

    Once the times of updates repeat, it compares the whole state at the beginning and the end of
    the repetition. If they are equal, it cuts the supply of minibatches, so that the run drains.

    Args:
        supply: minibatches of the run.
        period: minibatches after which every replica has had its turn.
    """

    def __init__(self, supply: MinibatchSupply, period: int) -> None:
        self._supply, self._period = supply, period
        self._begins_s: list[float] = []  # of the first rank's update, once a period
        self._next = 3  # periods after which to look
        self._cycle = 0  # minibatches after which the times of updates repeat
        self._first: RunState | None = None  # at the beginning of what may be a cycle
        self._due: int | None = None  # minibatch at whose update the state is needed
        self.cycle: Cycle | None = None

    def needs_state(self, number: int, time_s: float) -> bool:
        """Whether to look now; called as each update of the first rank begins.

        States before each rank has done a backward do not recur; by the third period all have.
        """
        if self.cycle is not None or number % self._period:
            return False
        self._begins_s.append(time_s)
        if self._due is None and len(self._begins_s) >= self._next:
            if (periods := repetition(self._begins_s)) is None:
                self._look_later()
            else:
                self._due, self._cycle = number, periods * self._period
        return number == self._due

    def add_state(self, state: RunState) -> None:
        """Takes the state of the run, if :meth:`needs_state` returned true."""
        if (first := self._first) is None:
            self._first, self._due = state, state.number + self._cycle
            return
        seconds = state.time_s - first.time_s
        is_same = state.places == first.places and all(
            abs(now_s - then_s) <= EQUAL * seconds
            for now_s, then_s in zip(state.ends_s, first.ends_s, strict=True)
        )
        if not is_same:
            self._first = self._due = None
            self._look_later()
            return
        busy_s = zip(state.busy_s, first.busy_s, strict=True)
        self.cycle = Cycle(
            minibatches=self._cycle,
            seconds=seconds,
            busy=tuple(min(1.0, (b - a) / seconds) if seconds else 0.0 for b, a in busy_s),
        )
        announced = self._supply.announced
        self._supply.limit = announced + (self._supply.limit - announced) % self._cycle

    def _look_later(self) -> None:
        self._next = len(self._begins_s) + max(1, len(self._begins_s) // 16)


def repetition(times_s: list[float]) -> int | None:
    """The number of steps after which the differences of times repeat, at the end; None: never."""
    last = len(times_s) - 1
    for cycle in range(1, last // 2 + 1):
        took_s = times_s[last] - times_s[last - cycle]
        if all(
            abs(times_s[k] - times_s[k - cycle] - took_s) <= EQUAL * took_s
            for k in range(last - 1, last - 1 - cycle, -1)
        ):
            return cycle
    return None
