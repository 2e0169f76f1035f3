"""The display of a running sweep: a live table in a terminal, log lines elsewhere.

The sweep continues if the display fails, for instance because the terminal was closed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from sparsepipe.utils.progress import SILENCE, Silence, duration_text

log = logging.getLogger(__name__)
_EVERY_S = 0.5
_BESIDE_LABEL = 52
"""Columns of a terminal for everything except the labels of jobs."""
_FIGURE = re.compile(r" \S+=\S+")
_STYLES = {"running": "bold", "finished": "green", "failed": "red", "stopped": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as the display shows it, numbered from 1.

    ``text`` is its label; ``state`` is ``running``, ``before`` (an earlier job finished the run) or
    the record's status; ``share`` is the finished part of a running job, from 0 to 1 (None:
    unknown); ``detail`` is the last line of its log, or the error.
    """

    number: int
    text: str
    state: str
    share: float | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState:
    """A snapshot of a sweep; ``total`` is its number of jobs, including those not begun."""

    rows: Sequence[JobRow]
    total: int

    @property
    def running(self) -> list[JobRow]:
        return [row for row in self.rows if row.state == "running"]

    @property
    def summary(self) -> str:
        """Numbers of jobs by state, as text."""
        counts = Counter(row.state for row in self.rows)
        done = counts["finished"] + counts["before"]
        others = [f"{counts[s]} {s}" for s in ("failed", "stopped", "running") if counts[s]]
        return ", ".join([f"{done} of {self.total} jobs done", *others])


class Lines:
    """Logs a line when a job begins or ends, and the progress of running jobs whenever nothing has
    been logged for a while, which ``silence`` tracks.
    """

    def __init__(self, silence: Silence = SILENCE) -> None:
        self._silence = silence

    def close(self) -> None:
        """Ends the display, so that other programs can use the terminal."""

    def began(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        log.info("job %d: %s", row.number, row.text)

    def ended(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        """Logs the job's state and the sweep's progress."""
        why = f": {row.detail}" if row.detail else ""
        how = "was finished before" if row.state == "before" else f"{row.state} after "
        took = "" if row.state == "before" else duration_text(row.seconds)
        log.info("job %d %s%s%s (%s)", row.number, how, took, why, state().summary)

    def show(self, state: Callable[[], SweepState]) -> None:
        """Logs the sweep's progress, without figures such as losses, if due after a silence."""

        def text() -> str:
            now = state()
            jobs = (
                f"  job {row.number} after {duration_text(row.seconds)}: "
                f"{_FIGURE.sub('', row.detail)}"
                for row in now.running
            )
            return "\n".join([now.summary, *jobs])

        self._silence.break_if_due(text)


class LiveView(Lines):
    """Shows a live table of the jobs below all other output of the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_s = -_EVERY_S

    def close(self) -> None:
        self._live.stop()

    def began(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        self._draw(state())

    def ended(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        """Logs a failure, which stays above the table."""
        if row.state not in ("finished", "before"):
            log.info("job %d (%s) %s: %s", row.number, row.text, row.state, row.detail)
        self._draw(state())

    def show(self, state: Callable[[], SweepState]) -> None:
        if time.monotonic() - self._shown_s >= _EVERY_S:
            self._draw(state())

    def _draw(self, state: SweepState) -> None:
        self._shown_s = time.monotonic()
        self._live.start()  # no effect once it is started
        room = max(3, self._console.height - 6)
        self._live.update(picture(state, room=room, width=self._console.width), refresh=True)


def picture(state: SweepState, *, room: int, width: int = 80) -> Group:
    """Draws a table of the running jobs and of those that ended last, in at most ``room`` rows.

    It is ``width`` characters wide: labels take what they need, the last log lines the rest.
    """
    running = state.running[:room]
    ended = [row for row in state.rows if row.state != "running"]
    rows = [*ended[len(ended) - max(0, room - len(running)) :], *running]
    label = min(max((len(row.text) for row in rows), default=0), max(18, width - _BESIDE_LABEL))
    table = Table(
        Column("job", justify="right"),
        Column("", width=label, no_wrap=True, overflow="ellipsis"),
        Column("state", no_wrap=True),
        Column("time", justify="right", no_wrap=True),
        Column("progress", min_width=12),
        Column("", ratio=1, no_wrap=True, overflow="ellipsis"),
        box=None,
        pad_edge=False,
        expand=True,
        header_style="dim",
    )
    for row in rows:
        table.add_row(
            str(row.number),
            Text(row.text),
            Text(row.state, style=_STYLES.get(row.state, "dim")),
            duration_text(row.seconds),
            "" if row.share is None else ProgressBar(total=1.0, completed=row.share, width=12),
            Text(row.detail, style="dim"),
        )
    return Group(table, Text(state.summary))


class SafeDisplay:
    """Shows a sweep with a view, by default a live table in a terminal and log lines elsewhere;
    once the view raises an exception, shows nothing more.
    """

    def __init__(self, view: Lines | None = None) -> None:
        in_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self._view = view or (LiveView(Console(stderr=True)) if in_terminal else Lines())
        self._failed = False

    def close(self) -> None:
        self.show(methodcaller("close"))

    def show(self, action: Callable[[Lines], object]) -> None:
        if self._failed:
            return
        try:
            action(self._view)
        except Exception as error:  # jobs matter more than their display
            self._failed = True
            with suppress(Exception):
                self._view.close()  # which restores the streams
            log.warning("the sweep goes on without a display: %s: %s", type(error).__name__, error)


def print_run(run: str) -> None:
    """Prints a run's directory on standard output, as a single command does.

    If nobody reads standard output any more, it is redirected to the null device.
    """
    try:
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        log.warning("standard output is gone, but the sweep goes on: %s", error)
        # Otherwise flushing its buffer would fail when the process ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
