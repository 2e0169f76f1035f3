"""A job's process tree: started in a session of its own, ended as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from sparsepipe.results.files import write_text_atomic
from sparsepipe.sweep import tree
from sparsepipe.sweep.record import SweptJob


@dataclass(slots=True)
class JobProcess:
    """The processes of a job.

    Args:
        first: the one whose children the others are.
        mark: what all of them carry.
    """

    first: subprocess.Popen[bytes]
    mark: str

    @classmethod
    def start(
        cls,
        job: SweptJob,
        config: Mapping[str, Any],
        *,
        hardware: Mapping[str, Any] | None,
        cores: tuple[int, ...] | None,
        environment: Mapping[str, str],
    ) -> JobProcess:
        """Starts a job; what it says goes to its log.

        Args:
            job: which.
            config: resolved and checked.
            hardware: what it is told of that, as it sees less; None: nothing.
            cores: those it is to keep to; None: all that there are.
            environment: variables beside those of this process.
        """
        given = {
            "number": job.number,
            "overrides": list(job.overrides),
            "sweep": str(job.sweep),
            "parent": os.getpid(),
            "cores": None if cores is None else list(cores),
            "hardware": hardware,
            "config": config,
        }
        write_text_atomic(job.file, yaml.safe_dump(given, sort_keys=False))
        for stale in (job.record, job.started):  # of what had the same directory
            stale.unlink(missing_ok=True)
        mark = uuid.uuid4().hex
        variables = {
            **os.environ,
            **environment,
            "PYTHONUNBUFFERED": "1",  # the log is whole wherever the process ends
            tree.MARK_VARIABLE: mark,
        }
        with job.log.open("wb") as log:
            first = subprocess.Popen(
                [sys.executable, "-m", "sparsepipe.sweep.job_process", str(job.file)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the sweep to pass on
            )
        return cls(first, mark)

    def ask_to_end(self, signum: int) -> None:
        """Passes a signal to the first process, which sees to the others."""
        self.first.send_signal(signum)

    def kill(self) -> None:
        """Kills all of them."""
        with suppress(ProcessLookupError, PermissionError):
            if self.first.poll() is None:
                os.killpg(self.first.pid, signal.SIGKILL)
        tree.kill(self.mark)

    def exit_code(self) -> int | None:
        """Of the first process; None while it runs."""
        return self.first.poll()

    def is_gone(self) -> bool:
        """Whether none of them is left."""
        return not self.left()

    def left(self) -> list[int]:
        """Those that are."""
        first = [self.first.pid] if self.first.poll() is None else []
        return sorted({*first, *tree.members(self.mark)})
