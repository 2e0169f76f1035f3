"""Makes a processor slower than it is, by pausing after what it computes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparsepipe.errors import ConfigError

# A sleep ends late by what the kernel's timer and its scheduler take, 0.05 ms and more, which for
# layers that take less would be all that is measured: so the last part of a pause is spent
# looking at the clock. Meanwhile this thread keeps Python's lock from those of the transport, so
# that part is short.
_SPIN_S = 0.0003


class Slowdown:
    """Stretches blocks of computation.

    What counts is the processor time of the thread that runs a block: waits for other ranks are
    no computation, and its own time stands for that of intra-op threads.

    Args:
        factor: how many times as long a block is to take, from 1 on; 1 costs nothing.
    """

    def __init__(self, factor: float = 1.0) -> None:
        if not (math.isfinite(factor) and factor >= 1):
            raise ConfigError(
                f"slowdown={factor}", remedy="give a number from 1 on: 2 is half the speed"
            )
        self.factor = factor
        self._counted_s = 0.0  # processor time of blocks that are over, with their pauses

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Context that pauses at its end, ``factor - 1`` times as long as its block computed.

        A block within another pauses for itself, and the outer one for the rest. A block that
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
    """Does nothing for that long, never shorter and hardly longer."""
    end_s = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < end_s:
        pass
