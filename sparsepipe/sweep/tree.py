"""All processes of a job, whatever sessions they have made and whoever their parents are by now.

They carry a mark in their environment, which processes inherit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "SPARSEPIPE_SWEEP_JOB"


def members(mark: str) -> list[int]:
    """Processes with this mark, but for this one; none where the system does not show them."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = (int(name) for name in names if name.isdigit())
    return [process for process in found if process != os.getpid() and _has(process, mark)]


def kill(mark: str) -> None:
    """Kills the processes with this mark that there are at this moment."""
    for process in members(mark):
        for handle in _handle(process):
            # The number may have become another's since it was found.
            if _has(process, mark):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)


def _has(process: int, mark: str) -> bool:
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return False
    return f"{MARK_VARIABLE}={mark}".encode() in variables


def _handle(process: int) -> Iterator[int]:
    """A handle of the process for one turn of a loop; none where it has ended."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return
    try:
        yield handle
    finally:
        os.close(handle)
