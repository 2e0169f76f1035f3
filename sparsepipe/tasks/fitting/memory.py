"""Peak resident memory of this process since a given moment, and limits on it. Linux only.

The peak is the kernel's (``VmHWM``), which is reset at that moment.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from pathlib import Path

from sparsepipe.errors import HardwareError
from sparsepipe.utils.process import give_freed_memory_back

OVER_BUDGET, OUT_OF_MEMORY, TOO_FEW_SHAPES = 91, 92, 93
"""Exit statuses of probes: over the budget, out of memory, no batch of the size."""
_PROC = Path("/proc/self")
_POLL_S = 0.005
"""Interval between two checks of the memory: little of it can be filled in so short a time."""


class ResidentPeak:
    """The peak of resident memory since this object was made, minus the memory resident then.

    From then on, large freed blocks go back to the system at once. Otherwise glibc would keep some
    of them, and the memory of the same step would differ by a tenth between processes.

    Attributes:
        before_bytes: resident memory when the object was made.
    """

    def __init__(self) -> None:
        give_freed_memory_back()
        try:
            (_PROC / "clear_refs").write_text("5")
            self.before_bytes = status_bytes("VmRSS")
        except OSError as error:
            raise HardwareError(
                f"this system does not report the memory of a process: {error}",
                remedy="measure memory on Linux, or on a GPU",
            ) from error

    def bytes(self) -> int:
        return max(0, status_bytes("VmHWM") - self.before_bytes)


def status_bytes(name: str) -> int:
    """A size in bytes that the kernel reports for this process, such as ``VmRSS``."""
    text = (_PROC / "status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"{_PROC}/status has no {name}")
    return 1024 * int(found[1])


def end_beyond(most_bytes: float) -> None:
    """Ends this process with status :data:`OVER_BUDGET` once more than ``most_bytes`` are resident.

    A thread watches, since torch computes without Python's lock.
    """

    def watch() -> None:
        while status_bytes("VmRSS") <= most_bytes:
            time.sleep(_POLL_S)
        os._exit(OVER_BUDGET)

    threading.Thread(target=watch, name="memory-watch", daemon=True).start()


def limit_allocations(more_bytes: int) -> None:
    """Makes allocations fail that would add more than ``more_bytes`` to this process's memory.

    Unlike that of :func:`end_beyond`, this limit also counts memory that is never used.
    """
    limit = status_bytes("VmData") + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def prefer_as_victim(thousandths: int = 1000) -> None:
    """Makes the kernel end this process and its children first if memory runs out.

    Args:
        thousandths: share of all memory, in thousandths, that the kernel adds to the memory of this
            process when it chooses; 1000 is the most. A larger share that is already set stays.
    """
    score = _PROC / "oom_score_adj"
    with contextlib.suppress(OSError, ValueError):  # the other limits hold all the same
        score.write_text(str(max(thousandths, int(score.read_text()))))
