"""Peak resident memory of this process from a moment on, and limits of its memory. Linux only.

The peak is that of the kernel (``VmHWM``), which is reset at that moment.
"""

from __future__ import annotations

import contextlib
import re
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.errors import HardwareError
from sparsepipe.utils.host import group_files
from sparsepipe.utils.memory import give_freed_memory_back

OVER_BUDGET = 91
"""Exit status of a process that the watch ended."""
_STATUS = Path("/proc/self/status")
_SET_BACK = Path("/proc/self/clear_refs")
_VICTIM = Path("/proc/self/oom_score_adj")
_SURELY = 1000
_MUCH = 0.5
"""Share of the memory that there is: the watch looks every few milliseconds, and other processes
may have taken some."""
_POLL_S = 0.005
"""Interval between two checks of the memory: little can be written in so short a time."""


class ResidentPeak:
    """The most memory that was resident at a time since this was made, beyond what was then.

    From then on large blocks that are freed go back to the system at once. Else glibc would keep
    some of them, now these and now those, and the same step would take a tenth more or less from
    one process to the next.

    Attributes:
        before_bytes: what was resident then.

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
        thousandths: of all memory, as which this counts beside what a process has: with 1000 it
            is this process and no other. Where it counts as more already, it stays so.
    """
    with contextlib.suppress(OSError, ValueError):  # the other limits hold
        _VICTIM.write_text(str(max(thousandths, int(_VICTIM.read_text()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The most memory that a process was seen to have."""

    resident_bytes: int = 0
    before_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> Seen:
        """Reads the file that the probe wrote; zeros before its steps have begun."""
        try:
            resident_bytes, before_bytes = map(int, path.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            return cls()
        return cls(resident_bytes=resident_bytes, before_bytes=before_bytes)


def took_much(seen: Seen, *, budget_bytes: int | None, most_bytes: int | None) -> bool:
    """Whether a process had taken so much that memory may have run out for it.

    What was free when it began does not count: others that held the rest may be gone next time.

    Args:
        seen: of it.
        budget_bytes: that its steps might take of the host's memory; None: any.
        most_bytes: that any process can have here; None: unknown.
    """
    own_bytes = max(0, seen.resident_bytes - seen.before_bytes)
    of_budget = budget_bytes is not None and own_bytes >= _MUCH * budget_bytes
    of_most = most_bytes is not None and seen.resident_bytes >= _MUCH * most_bytes
    return of_budget or of_most or budget_bytes is most_bytes is None


def most_bytes() -> int | None:
    """The machine's memory, or the least limit of this process's control groups and those above.

    None where that is unknown.
    """
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found.append(total_in(Path("/proc/meminfo").read_text(encoding="ascii")))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for file in limit_files(Path("/proc/self/cgroup").read_text(encoding="utf-8")):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found.append(limit_in(file.read_text(encoding="ascii")))
    return min((each for each in found if each is not None), default=None)


def limit_files(own: str) -> list[Path]:
    """Files with a limit of memory for the control groups of ``/proc/self/cgroup``."""
    names, before = ("memory.max",), ("memory.limit_in_bytes",)
    return [path for (path,) in group_files(own, "memory", names=names, names_before=before)]


def total_in(meminfo: str) -> int | None:
    """Total memory by ``/proc/meminfo``, in bytes."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def limit_in(text: str) -> int | None:
    """The limit in a control group's file, in bytes; None for ``max``."""
    return int(text) if text.strip().isdigit() else None
