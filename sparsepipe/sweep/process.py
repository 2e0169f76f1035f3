"""A job's processes, which are started in a session of their own and ended together.

All of them inherit a mark in their environment, by which they are found even if they have made
sessions of their own or lost their parents.
"""

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

import psutil
import yaml

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.sweep.record import SweptJob
from sparsepipe.utils.files import write_text_atomic

MARK_VARIABLE = "SPARSEPIPE_SWEEP_JOB"
"""Environment variable: the mark of a job's processes."""


@dataclass(slots=True)
class JobProcess:
    """The processes of a job: the first one, and all that carry its mark."""

    first: subprocess.Popen[bytes]
    mark: str

    @classmethod
    def start(
        cls,
        job: SweptJob,
        spec: RunSpec,
        *,
        hardware: Mapping[str, Any] | None,
        cores: tuple[int, ...] | None,
        environment: Mapping[str, str],
        wait_limit_s: float | None = None,
    ) -> JobProcess:
        """Starts a job, whose output goes to its log. ``hardware``: None, or the message of
        :func:`announce_hardware`; ``cores``: numbers of its cores, None: all; ``wait_limit_s``:
        limit on its wait for another process that works on the same run, None: no limit.
        """
        given = {
            "number": job.number,
            "overrides": list(job.overrides),
            "sweep": str(job.sweep),
            "parent": os.getpid(),
            "cores": None if cores is None else list(cores),
            "hardware": hardware,
            "wait_limit_s": wait_limit_s,
            "config": spec.to_dict(),
        }
        write_text_atomic(job.file, yaml.safe_dump(given, sort_keys=False))
        for stale in (job.record, job.started):  # of an earlier job in the same directory
            stale.unlink(missing_ok=True)
        mark = uuid.uuid4().hex
        variables = {
            **os.environ,
            **environment,
            "PYTHONUNBUFFERED": "1",  # the log is complete whenever the process ends
            MARK_VARIABLE: mark,
        }
        with job.log.open("wb") as log:
            first = subprocess.Popen(
                [sys.executable, "-m", "sparsepipe.sweep.job", str(job.file)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the sweep passes a terminal's Ctrl-C on
            )
        return cls(first, mark)

    def interrupt(self, signum: int) -> None:
        """Sends a signal to the first process, which ends the others."""
        self.first.send_signal(signum)

    def exit_code(self) -> int | None:
        return self.first.poll()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self.first.poll() is None:
                os.killpg(self.first.pid, signal.SIGKILL)
        for process in marked(self.mark):
            with suppress(psutil.Error):  # it has ended, and another may have its id
                process.kill()

    def alive(self) -> list[int]:
        first = [self.first.pid] if self.first.poll() is None else []
        return sorted({*first, *(process.pid for process in marked(self.mark))})


def marked(mark: str) -> list[psutil.Process]:
    """All processes with this mark, except the calling one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
    return found
