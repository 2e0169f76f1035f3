"""Time that passes as if something had been computed, while the processor is free for others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sparsepipe.errors import ConfigError

_GRAIN_S = 0.001
"""Of shorter pauses, most would be what the kernel's timer takes: they are saved up."""
_MOST_CREDIT_S = 0.1
"""How much too long a pause may have been for the next ones to make up for it."""


class Pace:
    """Pauses that are as long as is said, all together.

    A pause ends late where many processes share few cores; the next ones are shorter by that.
    So there is no need to spend the end of a pause looking at the clock, which would take the
    cores from other ranks.

    Args:
        time_scale: how many times as long every pause is to be.
        clock: seconds that only grow.
        sleep: waits.

    Raises:
        ConfigError: the scale is no number above 0.
    """

    def __init__(
        self,
        time_scale: float = 1.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ConfigError(
                f"time_scale={time_scale}", remedy="give a number above 0: 2 is half the speed"
            )
        self._time_scale = time_scale
        self._clock = clock
        self._sleep = sleep
        self._owed_s = 0.0

    def now_s(self) -> float:
        """The time, for :meth:`take`."""
        return self._clock()

    def take(self, seconds: float, *, since_s: float | None = None) -> None:
        """Lets time pass.

        Args:
            seconds: how much, before it is scaled.
            since_s: when work began which takes some of that time by itself, or all of it, or more;
                None: there was none. See :meth:`now_s`.
        """
        worked_s = 0.0 if since_s is None else self._clock() - since_s
        self._owed_s += max(0.0, self._time_scale * seconds - worked_s)
        if self._owed_s < _GRAIN_S:
            return
        begin_s = self._clock()
        self._sleep(self._owed_s)
        self._owed_s = max(self._owed_s - (self._clock() - begin_s), -_MOST_CREDIT_S)
