"""What happens next: a queue of calls, each at its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Calls in the order of their times, those of one time in the order they were asked for.

    Attributes:
        now_s: time of the call that runs.
    """

    __slots__ = ("_afterwards", "_asked", "_heap", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._asked = 0
        self._afterwards: list[Callable[[], None]] = []
        self.now_s = 0.0

    def at(self, time_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Calls ``call(argument)`` at a time, which is not before now."""
        self._asked += 1
        heapq.heappush(self._heap, (time_s, self._asked, call, argument))

    def before_time_goes_on(self, call: Callable[[], None]) -> None:
        """Calls ``call()`` now, after everything else that happens now or has been asked to.

        What it asks for in turn of this kind comes after the next call of all.
        """
        self._afterwards.append(call)

    @property
    def next_s(self) -> float:
        """Time of the next call; infinite where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def run(self) -> None:
        """Goes on until nothing is left to happen."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now_s, _, call, argument = pop(heap)
            call(argument)
            if self._afterwards and (not heap or heap[0][0] > self.now_s):
                calls, self._afterwards = self._afterwards, []
                for each in calls:
                    each()
