"""How a person follows a sweep: a live table in a terminal, lines elsewhere.

A display cannot end a sweep: the terminal may go, or the reader of a pipe.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparsepipe.sweep.board import Board, Row, duration_text

log = logging.getLogger(__name__)
_EVERY_S = 0.5
_STYLES = {"running": "bold", "finished": "green", "failed": "red", "stopped": "yellow"}


class Lines:
    """A line when a job begins, and one when it ends; shown while the block runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def began(self, row: Row, board: Callable[[], Board]) -> None:
        log.info("job %d: %s", row.number, row.text)

    def ended(self, row: Row, board: Callable[[], Board]) -> None:
        """Logs the job's state and the sweep's progress."""
        why = f": {row.detail}" if row.detail else ""
        how = "was finished before" if row.state == "before" else f"{row.state} after "
        took = "" if row.state == "before" else duration_text(row.seconds)
        log.info("job %d %s%s%s (%s)", row.number, how, took, why, board().summary)

    def show(self, board: Callable[[], Board]) -> None:
        """Nothing to draw."""


class LiveView(Lines):
    """A table that is drawn anew below all other output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown_s = -_EVERY_S

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def began(self, row: Row, board: Callable[[], Board]) -> None:
        self._draw(board())

    def ended(self, row: Row, board: Callable[[], Board]) -> None:
        """Leaves a failure above the table."""
        if row.state not in ("finished", "before"):
            log.info("job %d (%s) %s: %s", row.number, row.text, row.state, row.detail)
        self._draw(board())

    def show(self, board: Callable[[], Board]) -> None:
        if time.monotonic() - self._shown_s >= _EVERY_S:
            self._draw(board())

    def _draw(self, board: Board) -> None:
        self._shown_s = time.monotonic()
        room = max(3, self._console.height - 6)
        self._live.update(picture(board, room=room), refresh=True)


def view() -> Lines:
    """The view that suits the command's output."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return LiveView(Console(stderr=True))
    return Lines()


def picture(board: Board, *, room: int) -> Group:
    """The table: jobs that run and those that ended last, in at most ``room`` rows."""
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    columns: tuple[tuple[str, dict[str, Any]], ...] = (
        ("job", {"justify": "right"}),
        ("", {"ratio": 3, "no_wrap": True, "overflow": "ellipsis"}),
        ("state", {}),
        ("time", {"justify": "right", "no_wrap": True}),
        ("progress", {"min_width": 12}),
        ("left", {"justify": "right", "no_wrap": True}),
        ("", {"ratio": 3, "no_wrap": True, "overflow": "ellipsis"}),
    )
    for name, settings in columns:
        table.add_column(name, **settings)
    running = board.running[:room]
    ended = board.ended[len(board.ended) - max(0, room - len(running)) :]
    for row in (*ended, *running):
        table.add_row(
            str(row.number),
            Text(row.text),
            Text(row.state, style=_STYLES.get(row.state, "dim")),
            duration_text(row.seconds),
            _bar(row),
            board.eta(row),
            Text(row.detail, style="dim"),
        )
    return Group(table, Text(board.summary))


def _bar(row: Row) -> ProgressBar | str:
    if row.going is None or row.going.share is None:
        return ""
    return ProgressBar(total=1.0, completed=row.going.share, width=12)


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
