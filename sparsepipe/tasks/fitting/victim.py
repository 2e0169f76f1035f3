"""Whether the OOM killer ended a probe for what it had taken itself.

Where memory runs out a probe is the first to go, whoever has taken the memory. One that was small
then says nothing of what fits.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.utils.host import group_files

_MUCH = 0.5
"""Of what there is: the watch looks every few milliseconds, and others may have taken some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The most memory that a process was seen to have.

    Args:
        resident_bytes: all of it.
        before_bytes: when its steps began.
    """

    resident_bytes: int = 0
    before_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> Seen:
        """As it has noted that; nothing where its steps had not begun."""
        try:
            resident_bytes, before_bytes = map(int, path.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            return cls()
        return cls(resident_bytes=resident_bytes, before_bytes=before_bytes)


def took_much(seen: Seen, *, budget_bytes: int | None, most_bytes: int | None) -> bool:
    """Whether a process had taken so much that memory may have run out for it.

    What was free when it began is not asked: others that held the rest may be gone next time.

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

    None where nobody tells.
    """
    found = []
    with suppress(OSError, UnicodeDecodeError):
        found.append(total_in(Path("/proc/meminfo").read_text(encoding="ascii")))
    with suppress(OSError, UnicodeDecodeError):
        for file in limit_files(Path("/proc/self/cgroup").read_text(encoding="utf-8")):
            with suppress(OSError, UnicodeDecodeError):
                found.append(limit_in(file.read_text(encoding="ascii")))
    return min((each for each in found if each is not None), default=None)


def limit_files(own: str) -> list[Path]:
    """Files with a limit of memory for the control groups of ``/proc/self/cgroup``."""
    names, before = ("memory.max",), ("memory.limit_in_bytes",)
    return [path for (path,) in group_files(own, "memory", names=names, names_before=before)]


def total_in(meminfo: str) -> int | None:
    """What ``/proc/meminfo`` says that the machine has."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def limit_in(text: str) -> int | None:
    """What such a file says in bytes; None for ``max``. Version 1 says a huge number."""
    return int(text) if text.strip().isdigit() else None
