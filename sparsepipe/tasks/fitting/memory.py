"""Peak resident memory of this process from a moment on, and limits of its memory. Linux only.

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
from sparsepipe.utils.memory import give_freed_memory_back

OVER_BUDGET = 91
"""Exit status of a process that the watch has ended."""
_STATUS = Path("/proc/self/status")
_SET_BACK = Path("/proc/self/clear_refs")
_VICTIM = Path("/proc/self/oom_score_adj")
_SURELY = 1000
_POLL_S = 0.005
"""Interval between two checks of the memory: little can be written in so short a time."""


class ResidentPeak:
    """The most memory that was resident at a time since this was made, beyond what was then.

    From then on large blocks that are freed go back to the system at once. Else glibc would keep
    some of them, now these and now those, and the same step would take a tenth more or less from
    one process to the next.

    Attributes:
        before_bytes: resident memory at that moment.

    Raises:
        HardwareError: the system does not report it.
    """

    def __init__(self) -> None:
        give_freed_memory_back()
        try:
            _SET_BACK.write_text("5")
            self.before_bytes = status_bytes("VmRSS")
        except OSError as error:
            raise HardwareError(
                f"this system does not report the memory of a process: {error}",
                remedy="measure memory on Linux, or on a GPU",
            ) from error

    def bytes(self) -> int:
        return max(0, status_bytes("VmHWM") - self.before_bytes)


def status_bytes(name: str) -> int:
    """A size that the kernel reports of this process, such as ``VmRSS``.

    Raises:
        OSError: it reports none.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {name}")
    return 1024 * int(found[1])


def end_beyond(most_bytes: float) -> None:
    """Ends this process with the status :data:`OVER_BUDGET` once more memory is resident.

    Torch computes without Python's lock, so that a thread can watch beside it.
    """

    def watch() -> None:
        while status_bytes("VmRSS") <= most_bytes:
            time.sleep(_POLL_S)
        os._exit(OVER_BUDGET)

    threading.Thread(target=watch, name="memory-watch", daemon=True).start()


def limit_allocations(more_bytes: int) -> None:
    """Lets allocations fail that would take this process so far beyond its present memory.

    That is before the watch can see anything: allocated memory counts, also where it is
    never used.
    """
    limit = status_bytes("VmData") + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def prefer_as_victim(thousandths: int = _SURELY) -> None:
    """Makes the kernel end this process and its children first if memory runs out.

    Args:
        thousandths: share of all memory that counts in addition to the memory of the process; with
            1000 it is this process and no other. A larger share that is set already stays.
    """
    with contextlib.suppress(OSError, ValueError):  # the other limits hold
        _VICTIM.write_text(str(max(thousandths, int(_VICTIM.read_text()))))
