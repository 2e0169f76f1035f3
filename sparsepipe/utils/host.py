"""The host that this process runs on, and which of its cores the process may use."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
CPU_QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Names of the files with a CPU quota and its period: in cgroup version 2, and in version 1."""


def usable_cores() -> int:
    """Number of cores that this process may keep busy at a time."""
    return len(usable_core_numbers())


def usable_core_numbers(*, despite_quota: bool = False) -> tuple[int, ...]:
    """Numbers of the cores that this process may use, as many as it may keep busy at a time.

    These are the cores of its affinity (``taskset``, cpusets). Where a quota of CPU time
    (``docker --cpus``, a Kubernetes limit) allows fewer, only the first of them are returned,
    unless ``despite_quota``.
    """
    numbers = tuple(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        numbers = tuple(sorted(os.sched_getaffinity(0)))
    worth = []  # cores that each control group of this process allows; the least counts
    for files in () if despite_quota else group_files("cpu", *CPU_QUOTA):
        with suppress(OSError, UnicodeDecodeError):
            worth.append(cores_of_quota(" ".join(file.read_text("ascii") for file in files)))
    return numbers[: min((cores for cores in worth if cores is not None), default=None)]


def quota_limits() -> bool:
    """Whether a CPU quota allows fewer cores than the affinity; the kernel then picks the cores."""
    return usable_cores() < len(usable_core_numbers(despite_quota=True))


def cores_of_quota(text: str) -> int | None:
    """Number of cores that a quota can keep busy, rounded up; None without a quota.

    Args:
        text: quota and period in microseconds, such as ``150000 100000``; ``max`` or -1 in place of
            the quota means none.
    """
    found = re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", text)
    return None if found is None else max(1, math.ceil(int(found[1]) / int(found[2])))


def group_files(
    controller: str, names: Sequence[str], names_before: Sequence[str], *, own: str | None = None
) -> list[tuple[Path, ...]]:
    """Paths of files of this process's control groups and of all groups above, nearest first.

    The smallest limit of all groups applies. Files need not exist, since a container mounts its own
    group as the root.

    Args:
        controller: the cgroup controller of the limit, such as ``cpu`` or ``memory``.
        names: names of files that are read together, in cgroup version 2.
        names_before: the names of these files in version 1.
        own: the content of ``/proc/self/cgroup``; None: read from there, if it exists.
    """
    if own is None:
        file = Path("/proc/self/cgroup")
        own = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    found: list[tuple[Path, ...]] = []
    for line in own.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        mounts, files = [_GROUPS], names  # version 2, which names no controllers
        if controllers:
            is_it = controller in controllers.split(",")
            both = dict.fromkeys((_GROUPS / controller, _GROUPS / controllers))
            mounts, files = [*both] if is_it else [], names_before
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # outside of this process's root
            inner = PurePosixPath()
        groups = [mount / each for mount in mounts for each in (inner, *inner.parents)]
        found += [tuple(group / name for name in files) for group in groups]
    return found


def memory_bytes() -> int | None:
    """Physical memory of this host in bytes; None if the platform does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def cpu_name() -> str:
    """Model of this host's CPU, simplified by :func:`plain_name`."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return plain_name(line.partition(":")[2])
    except OSError:
        pass  # not Linux
    return plain_name(platform.processor() or platform.machine())


def plain_name(model: str) -> str:
    """Returns a CPU's model name without trademark signs and characters that need quoting.

    Overrides on the command line name devices: Hydra parses ``Intel Xeon Processor``, but not
    ``Intel(R) Xeon(R) Processor``.
    """
    unmarked = re.sub(r"\((?:R|TM|C)\)", "", model, flags=re.IGNORECASE)
    return " ".join(re.sub(r"[^\w .@/+-]", " ", unmarked).split())


@functools.cache  # a process keeps running the code that it has loaded
def git_commit() -> str | None:
    """``SPARSEPIPE_COMMIT`` if set, else the commit of the checkout that this package runs from,
    with ``-dirty`` if files have changed; None without a checkout. The first call should come at
    the start of a process, since later ones return its result.
    """
    if named := os.environ.get("SPARSEPIPE_COMMIT"):  # set for a copy without the history
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "sparsepipe", "conf")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not our checkout
