"""This process's machine and what it may use of it; open to every room."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model, as a command line takes it: see :func:`plain_name`."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return plain_name(line.partition(":")[2])
    except OSError:
        pass  # not Linux
    return plain_name(platform.processor() or platform.machine())


def plain_name(model: str) -> str:
    """What a vendor calls a processor, without marks and characters that want quoting.

    Profiles and plans name devices, and overrides name these: ``Intel(R) Xeon(R) Processor`` would
    be none that Hydra reads, ``Intel Xeon Processor`` is one.
    """
    unmarked = re.sub(r"\((?:R|TM|C)\)", "", model, flags=re.IGNORECASE)
    return " ".join(re.sub(r"[^\w .@/+-]", " ", unmarked).split())
