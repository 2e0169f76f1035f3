"""What a process takes of its host's memory from a moment on, and limits that it cannot pass.

By its own measurement: the kernel's mark of the most memory that was resident, set back at that
moment. Linux only.
"""

from __future__ import annotations

import contextlib
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from sparsepipe.errors import HardwareError
from sparsepipe.utils.memory import give_freed_memory_back

_STATUS = Path("/proc/self/status")
_SET_BACK = Path("/proc/self/clear_refs")
_VICTIM = Path("/proc/self/oom_score_adj")
_SURELY = 1000
_POLL_S = 0.005
"""Between two looks at the memory: what is written in so short a time is little."""


class ResidentPeak:
    """The most memory that was resident at a time since this was made, beyond what was then.

    From then on large blocks that are freed go back to the system at once. Else glibc would keep
    some of them, now these and now those, and the same step would take a tenth more or less from
    one process to the next.

    Attributes:
        before_bytes: what was resident then.

    Raises:
        HardwareError: the system does not tell.
    """

    def __init__(self) -> None:
        give_freed_memory_back()
        try:
            _SET_BACK.write_text("5")
            self.before_bytes = status_bytes("VmRSS")
        except OSError as error:
            raise HardwareError(
                f"this system does not tell what memory a process takes: {error}",
                remedy="measure memory on Linux, or on a GPU",
            ) from error

    def bytes(self) -> int:
        """So far."""
        return max(0, status_bytes("VmHWM") - self.before_bytes)


def status_bytes(name: str) -> int:
    """A size that the kernel tells of this process, such as ``VmRSS``.

    Raises:
        OSError: it tells none.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {name}")
    return 1024 * int(found[1])


def watch_resident(
    most_bytes: float,
    passed: Callable[[], None],
    *,
    grown: Callable[[int], object] = lambda resident_bytes: None,
) -> None:
    """Calls ``passed``, in a thread of its own, once more than this is resident.

    Torch computes without Python's lock, so that the thread runs beside.

    Args:
        most_bytes: may be infinite.
        passed: is called once, and ends the watch.
        grown: is called with what is resident whenever that is more than it ever was.
    """

    def watch() -> None:
        largest = 0
        while (now := status_bytes("VmRSS")) <= most_bytes:
            if now > largest:
                largest = now
                grown(now)
            ended.wait(_POLL_S)
        passed()

    ended = threading.Event()  # never set: only its clock is needed
    threading.Thread(target=watch, name="memory-watch", daemon=True).start()


def limit_allocations(more_bytes: int) -> None:
    """Lets allocations fail that would take this process so far beyond what it has.

    That is before the watch can see anything: memory that is asked for counts, also where it is
    never used.
    """
    limit = status_bytes("VmData") + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def prefer_as_victim(thousandths: int = _SURELY) -> None:
    """Where memory runs out, the kernel is to end this process and those that it starts.

    Args:
        thousandths: of all memory, as which this counts beside what a process has: with 1000 it
            is this process and no other. Where it counts as more already, it stays so.
    """
    with contextlib.suppress(OSError, ValueError):  # the other limits hold
        _VICTIM.write_text(str(max(thousandths, int(_VICTIM.read_text()))))
