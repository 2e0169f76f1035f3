"""Shows progress: as a bar on a terminal, otherwise as a log line after a long silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

log = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Function that returns seconds that never decrease."""


class Silence:
    """Tracks how long nothing has been logged, and logs progress when that is too long.

    A job that logs more often, say a line an epoch, gets no further lines, and a job that ends
    within ``longest_s`` gets none at all.

    Args:
        longest_s: seconds without a log line after which progress is logged.
        clock: returns seconds that never decrease.
    """

    def __init__(self, *, longest_s: float = 30.0, clock: Clock = time.monotonic) -> None:
        self.longest_s = longest_s
        self._clock = clock
        self._last_s = clock()

    def broken(self) -> None:
        """Restarts the silence; called whenever something is logged."""
        self._last_s = self._clock()

    def break_if_due(self, text: Callable[[], str]) -> float:
        """Logs ``text()`` if a line is due; returns the seconds until the next one is due."""
        if self._last_s + self.longest_s <= self._clock():
            self.broken()
            log.info("%s", text())
        return max(0.0, self._last_s + self.longest_s - self._clock())

    @contextmanager
    def watched(self, text: Callable[[], str]) -> Iterator[None]:
        """Logs ``text()`` whenever a line is due while the block runs.

        A thread does so, because a single batch or file may take longer than ``longest_s``.
        """
        ended = Event()

        def watch() -> None:
            while not ended.wait(self.break_if_due(text)):
                pass

        thread = Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


SILENCE = Silence()
"""The silence of this process, which :mod:`sparsepipe.runs.logs` restarts at each log line."""


class Count:
    """Counts finished items; ``str()`` gives their number, the time taken and the time left.

    Args:
        what: what is being done, such as ``modelling shapes``.
        total: number of items; None: unknown.
        clock: returns seconds that never decrease.
    """

    def __init__(
        self, what: str, total: int | None = None, *, clock: Clock = time.monotonic
    ) -> None:
        self.what, self.total = what, total
        self._clock, self._begun_s = clock, clock()
        self._done = self._own = 0

    def reached(self, done: int | None = None) -> None:
        """Sets the number of finished items, by default one more than before. For the time left,
        all items of the first call except the last count as finished before this process began.
        """
        done = self._done + 1 if done is None else done
        self._own += 1 if not self._own else done - self._done
        self._done = done

    def __str__(self) -> str:
        elapsed_s = self._clock() - self._begun_s
        if not self._done and elapsed_s < 1:
            return self.what
        of = "" if self.total is None else f" of {self.total:,}"
        text = f"{self.what}: {self._done:,}{of} after {duration_text(elapsed_s)}"
        if self.total is None or not self._own or self._done >= self.total:
            return text
        left_s = (self.total - self._done) * elapsed_s / self._own
        return f"{text}, about {duration_text(left_s)} left"


def duration_text(seconds: float) -> str:
    """Formats a duration as ``45 s``, ``12 min``, ``3.4 h`` or ``41 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 120 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """Shows the block's progress; yields ``advance(total)``, which counts one item of ``total``."""
    from rich.console import Console  # slow, and most commands show no progress
    from rich.progress import MofNCompleteColumn, Progress

    console, count = Console(stderr=True), Count(what)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    shown = console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=not shown)
    task = bar.add_task(what, total=None)

    def advance(total: int) -> None:
        count.total = total
        count.reached()
        bar.update(task, advance=1, total=total)

    with bar, nullcontext() if shown else SILENCE.watched(lambda: str(count)):
        yield advance
