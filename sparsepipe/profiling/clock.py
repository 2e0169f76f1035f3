"""Time as a device sees it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Marks in the work of a device, and the seconds between them.

    On CUDA marks are events in the current stream, and nothing waits for the device until the
    seconds are asked for; elsewhere they are readings of a monotonic clock.

    Args:
        device: that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks the end of what was done so far."""
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next, and forgets them."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return [after - before for before, after in pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]

    def synchronise(self) -> None:
        """Waits until the device has done what it was given."""
        if self._cuda:
            torch.cuda.synchronize(self._device)


def median_and_spread(times_s: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    if len(times_s) < 2:
        return times_s[0], 0.0
    low, middle, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return middle, high - low
