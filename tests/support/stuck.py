"""Doubles of processes that stay whatever is done to them: few machines let us make real ones."""

from __future__ import annotations

import subprocess
from typing import Any

from sparsepipe.sweep.process import JobProcess

NUMBER = 2**22 + 1  # which no process has


class StuckJob(JobProcess):
    """The processes of a job, of which one stays.

    Args:
        mark: of the job.
        exit_code: of its first process, where that has ended and another one stays.
    """

    def __init__(self, mark: str, *, exit_code: int | None = None) -> None:
        self.mark, self._is_there, self._exit_code = mark, True, exit_code

    def let_go(self) -> None:
        """It is gone."""
        self._is_there = False

    def interrupt(self, signum: int) -> None:
        """It hears nothing."""

    def kill(self) -> None:
        """Nor does that end it."""

    def exit_code(self) -> int | None:
        return self._exit_code

    def alive(self) -> list[int]:
        return [NUMBER] if self._is_there else []


class StuckProcess:
    """What :class:`subprocess.Popen` gives, of a process that does not end."""

    pid = NUMBER

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.killed = False

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("it", timeout_s)

    def kill(self) -> None:
        self.killed = True
