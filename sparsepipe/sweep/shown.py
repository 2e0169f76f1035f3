"""What shows a sweep, and cannot end it: a terminal may go, or who reads a pipe."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from sparsepipe.sweep.board import Board, Row
from sparsepipe.sweep.view import View

log = logging.getLogger(__name__)


class Lasting:
    """Shows as a view does until that fails, then nothing any more.

    Args:
        view: the view.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._on = True

    def __enter__(self) -> Self:
        self._try(self._view.__enter__)
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            self._try(lambda: self._view.__exit__(None, None, None))

    def began(self, row: Row, board: Callable[[], Board]) -> None:
        """A job has begun."""
        self._try(lambda: self._view.began(row, board))

    def ended(self, row: Row, board: Callable[[], Board]) -> None:
        """A job has ended."""
        self._try(lambda: self._view.ended(row, board))

    def show(self, board: Callable[[], Board]) -> None:
        """Called often."""
        self._try(lambda: self._view.show(board))

    def _try(self, show: Callable[[], object]) -> None:
        if not self._on:
            return
        try:
            show()
        except Exception as error:  # whatever it is: jobs count, and not how they are shown
            self._on = False
            with suppress(Exception):
                self._view.__exit__(None, None, None)  # which gives the streams back
            log.warning(
                "the sweep goes on and is shown no more: %s: %s", type(error).__name__, error
            )


def say_run(run: str) -> None:
    """Says a run's directory on standard output, as a command does that is no sweep.

    Where nobody reads that any more, it and what follows lead nowhere.
    """
    try:
        sys.stdout.write(f"{run}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # or it is closed
        log.warning("standard output is gone, the sweep goes on: %s", error)
        with suppress(
            OSError, ValueError
        ):  # else what is left in its buffer is an error at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
