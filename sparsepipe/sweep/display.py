"""The display of a running sweep: its state, a live table in a terminal, log lines elsewhere.

The sweep continues if the display fails, for instance because the terminal was closed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparsepipe.utils.progress import SILENCE, Silence, duration_text

log = logging.getLogger(__name__)
_EVERY_S = 0.5
_LEAST_LABEL, _BESIDE_LABEL = 18, 52
"""Columns of a terminal for what a job is called, at least, and those for everything else."""
_NAME = re.compile(r"(?<!\S)(?:[\w-]+\.)*([\w-]+)(?==)")
"""The last part of an override's name, with the groups before it."""
_FIGURE = re.compile(r" \S+=\S+")
_STYLES = {"running": "bold", "finished": "green", "failed": "red", "stopped": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Progress of a running job; ``share`` is done, from 0 to 1, and None where unknown."""

    elapsed_s: float
    share: float | None = None
    share_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job, numbered from 1. ``state`` is ``running``, ``before`` (the run was finished before) or
    the record's status; ``detail`` is the last line of its log, or the error.
    """

    number: int
    text: str
    state: str
    progress: JobProgress | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState:
    """A snapshot of a sweep. ``total`` counts the jobs that have not begun as well, ``done_s`` are
    durations of jobs that this sweep has finished.
    """

    rows: Sequence[JobRow]
    total: int
    done_s: Sequence[float]

    @property
    def running(self) -> list[JobRow]:
        return [row for row in self.rows if row.progress is not None]

    @property
    def ended(self) -> list[JobRow]:
        return [row for row in self.rows if row.progress is None]

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self.total - len(self.rows)

    @property
    def left_s(self) -> float | None:
        """How long the sweep will still take; None where that is unknown."""
        running = [row.progress for row in self.running if row.progress is not None]
        return sweep_left_s(self.done_s, running, waiting=self.waiting)

    @property
    def summary(self) -> str:
        done = sum(row.state in ("finished", "before") for row in self.ended)
        parts = [f"{done} of {self.total} jobs done"]
        for state in ("failed", "stopped"):
            if count := sum(row.state == state for row in self.ended):
                parts.append(f"{count} {state}")
        if self.running:
            parts.append(f"{len(self.running)} running")
        is_ending = any(row.state == "stopped" for row in self.ended)
        if self.left_s is not None and (self.running or self.waiting) and not is_ending:
            parts.append(f"about {duration_text(self.left_s)} left")
        return ", ".join(parts)

    def eta(self, row: JobRow) -> str:
        """How long a job will still take, as text; empty where that is unknown."""
        typical_s = sum(self.done_s) / len(self.done_s) if self.done_s else None
        if row.progress is None or (left := left_s(row.progress, typical_s)) is None:
            return ""
        return duration_text(left)


def left_s(job: JobProgress, typical_s: float | None) -> float | None:
    """How long a job will still take: at its own pace, else as long as others did."""
    if job.share is not None and job.share > job.share_before:
        return job.elapsed_s * (1 - job.share) / (job.share - job.share_before)
    return None if typical_s is None else max(0.0, typical_s - job.elapsed_s)


def sweep_left_s(
    done_s: Sequence[float], running: Sequence[JobProgress], *, waiting: int
) -> float | None:
    """How long a sweep will still take; None where that is unknown.

    Args:
        done_s: how long finished jobs took, without those that had been finished before.
        running: progress of running jobs; as many run at a time until the end.
        waiting: how many have not begun.
    """
    known = [*done_s] or [
        job.elapsed_s + left for job in running if (left := left_s(job, None)) is not None
    ]
    typical_s = sum(known) / len(known) if known else None
    rest = [left_s(job, typical_s) for job in running]
    if any(one is None for one in rest) or (waiting and typical_s is None):
        return None
    total_s = sum(one for one in rest if one is not None) + waiting * (typical_s or 0.0)
    longest_s = max((one for one in rest if one is not None), default=0.0)
    return max(longest_s, total_s / max(1, len(running)))


def running_text(state: SweepState) -> str:
    """How far a sweep and each of its running jobs are, in lines.

    What a job's log says of figures, such as ``train/loss=0.5``, is left out.
    """
    jobs = [
        f"  job {row.number} after {duration_text(row.seconds)}: {_FIGURE.sub('', row.detail)}"
        for row in state.running
    ]
    return "\n".join([state.summary, *jobs])


class Lines:
    """A line when a job begins, and one when it ends; in between, how far the running ones are
    whenever nothing was logged for long. Shown while the block runs.

    Args:
        silence: since when nothing was logged.
    """

    def __init__(self, silence: Silence = SILENCE) -> None:
        self._silence = silence

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def began(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        log.info("job %d: %s", row.number, row.text)

    def ended(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        """Logs the job's state and the sweep's progress."""
        why = f": {row.detail}" if row.detail else ""
        how = "was finished before" if row.state == "before" else f"{row.state} after "
        took = "" if row.state == "before" else duration_text(row.seconds)
        log.info("job %d %s%s%s (%s)", row.number, how, took, why, state().summary)

    def show(self, state: Callable[[], SweepState]) -> None:
        """Called all the time."""
        self._silence.break_if_due(lambda: running_text(state()))


class LiveView(Lines):
    """A table that is drawn anew below all other output."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_s = -_EVERY_S

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def began(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        self._draw(state())

    def ended(self, row: JobRow, state: Callable[[], SweepState]) -> None:
        """Leaves a failure above the table."""
        if row.state not in ("finished", "before"):
            log.info("job %d (%s) %s: %s", row.number, row.text, row.state, row.detail)
        self._draw(state())

    def show(self, state: Callable[[], SweepState]) -> None:
        if time.monotonic() - self._shown_s >= _EVERY_S:
            self._draw(state())

    def _draw(self, state: SweepState) -> None:
        self._shown_s = time.monotonic()
        room = max(3, self._console.height - 6)
        shown = picture(state, room=room, width=self._console.width)
        self._live.update(shown, refresh=True)


def view() -> Lines:
    """The view that suits the command's output."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return LiveView(Console(stderr=True))
    return Lines()


def picture(state: SweepState, *, room: int, width: int = 80) -> Group:
    """The table: jobs that run and those that ended last, in at most ``room`` rows.

    What tells jobs apart has the room that it needs, before the end of their logs.
    """
    running = state.running[:room]
    ended = state.ended[len(state.ended) - max(0, room - len(running)) :]
    rows = [(row, _without_groups(row.text)) for row in (*ended, *running)]
    longest = max((len(text) for _, text in rows), default=0)
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    columns: tuple[tuple[str, dict[str, Any]], ...] = (
        ("job", {"justify": "right"}),
        (
            "",
            {
                "width": min(longest, max(_LEAST_LABEL, width - _BESIDE_LABEL)),
                "no_wrap": True,
                "overflow": "ellipsis",
            },
        ),
        ("state", {"no_wrap": True}),
        ("time", {"justify": "right", "no_wrap": True}),
        ("progress", {"min_width": 12}),
        ("left", {"justify": "right", "no_wrap": True}),
        ("", {"ratio": 1, "no_wrap": True, "overflow": "ellipsis"}),
    )
    for name, settings in columns:
        table.add_column(name, **settings)
    for row, text in rows:
        table.add_row(
            str(row.number),
            Text(text),
            Text(row.state, style=_STYLES.get(row.state, "dim")),
            duration_text(row.seconds),
            _bar(row),
            state.eta(row),
            Text(row.detail, style="dim"),
        )
    return Group(table, Text(state.summary))


def _without_groups(text: str) -> str:
    """Overrides without the groups before their names, where the names tell them apart."""
    names = [name.rpartition(".")[2] for name in _NAME.findall(text)]
    return text if len({*names}) < len(names) else _NAME.sub(lambda m: m[1], text)


def _bar(row: JobRow) -> ProgressBar | str:
    if row.progress is None or row.progress.share is None:
        return ""
    return ProgressBar(total=1.0, completed=row.progress.share, width=12)


class SafeDisplay:
    """Shows a sweep until its view fails, then nothing any more."""

    def __init__(self, view: Lines) -> None:
        self._view: Lines | None = view

    def __enter__(self) -> Self:
        self.show(lambda view: view.__enter__())
        return self

    def __exit__(self, *error: object) -> None:
        self.show(lambda view: view.__exit__(None, None, None))

    def show(self, action: Callable[[Lines], object]) -> None:
        if self._view is None:
            return
        try:
            action(self._view)
        except Exception as error:  # whatever it is: jobs count, and not how they are shown
            failed, self._view = self._view, None
            with suppress(Exception):
                failed.__exit__(None, None, None)  # which restores the streams
            log.warning("the sweep goes on without a display: %s: %s", type(error).__name__, error)


def print_run(run: str) -> None:
    """Prints a run's directory on standard output, as a single command does.

    Where nobody reads standard output any more, it is redirected to nowhere.
    """
    try:
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # or it is closed
        log.warning("standard output is gone, the sweep goes on: %s", error)
        # Else the rest of its buffer is an error when the process ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
