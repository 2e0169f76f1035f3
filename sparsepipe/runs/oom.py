"""How many processes the kernel has ended for want of memory, where it tells."""

from __future__ import annotations

from pathlib import Path

from sparsepipe.utils.host import group_files


def oom_kills() -> int | None:
    """Of this process's control group, else of the machine; None where nobody counts.

    It only grows: what counts is the difference between two moments.
    """
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        own = ""
    for path in (*counters(own), Path("/proc/vmstat")):
        try:
            count = kills_in(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if count is not None:
            return count
    return None


def kills_since(before: int | None) -> int | None:
    """How many there were since a moment; None where that is not known.

    Args:
        before: what :func:`oom_kills` said then.
    """
    now = oom_kills()
    return None if now is None or before is None else now - before


def counters(own: str) -> list[Path]:
    """Files that count them for the control groups of ``/proc/self/cgroup``, the nearest first."""
    names, before = ("memory.events",), ("memory.oom_control",)
    return [path for (path,) in group_files(own, "memory", names=names, names_before=before)]


def kills_in(text: str) -> int | None:
    """What such a file says."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None
