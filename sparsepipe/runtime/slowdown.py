"""Makes a CPU appear slower than it is, by pausing after each computation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparsepipe.errors import ConfigError

# A sleep ends late, by 0.05 ms and more for the kernel's timer and scheduler, which would dominate
# the time of layers that take less: so the last part of a pause is spent polling the clock. That
# part is short, since this thread meanwhile keeps Python's lock from the transport's threads.
_SPIN_S = 0.0003


class Slowdown:
    """Stretches blocks of computation.

    Computation is the CPU time of the thread that runs a block: waits for other ranks do not count,
    and intra-op threads are assumed to compute as long as this thread.

    Args:
        factor: how many times as long computation is to take, at least 1; 1 costs nothing.
    """

    def __init__(self, factor: float = 1.0) -> None:
        if not (math.isfinite(factor) and factor >= 1):
            raise ConfigError(
                f"slowdown={factor} is not a finite number of at least 1",
                remedy="give a number of at least 1: 2 halves the speed",
            )
        self.factor = factor
        self._counted_s = 0.0  # CPU time of finished blocks, with their pauses

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Context that pauses at its end, ``factor - 1`` times as long as its block computed.

        A block within another pauses for itself, and the outer one only for the rest. A block that
        raises does not pause.
        """
        if self.factor == 1:
            yield
            return
        begin_s, counted_s = time.thread_time(), self._counted_s
        yield
        computed_s = time.thread_time() - begin_s - (self._counted_s - counted_s)
        pause((self.factor - 1) * computed_s)
        self._counted_s = counted_s + time.thread_time() - begin_s


def pause(seconds: float) -> None:
    """Pauses this thread for at least ``seconds``, and hardly longer."""
    end_s = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < end_s:
        pass
