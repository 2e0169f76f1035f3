"""The host that this process runs on, and which of its cores the process may use."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import subprocess
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may keep busy."""
    return len(usable_core_numbers())


def usable_core_numbers() -> tuple[int, ...]:
    """Numbers of cores that this process may run on, as many as it may keep busy at a time.

    Those of its affinity (``taskset``, cpusets); where it has a quota of processor time that is
    worth fewer (``docker --cpus``, a limit of Kubernetes), the first so many of them.
    """
    return _affinity()[: _cores_of_quotas()]


def quota_limits() -> bool:
    """Whether a quota says how many: which these are, the kernel chooses at every moment."""
    worth = _cores_of_quotas()
    return worth is not None and worth < len(_affinity())


def _affinity() -> tuple[int, ...]:
    """Numbers of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cores_of_quotas() -> int | None:
    """What the least quota of this process's control groups is worth; None without one."""
    found = []
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        quotas = quota_files(own)
    except (OSError, UnicodeDecodeError):
        return None  # not Linux
    for files in quotas:
        try:
            text = " ".join(file.read_text(encoding="ascii") for file in files)
        except (OSError, UnicodeDecodeError):
            continue
        found.append(cores_of_quota(text))
    return min((cores for cores in found if cores is not None), default=None)


def quota_files(own: str) -> list[tuple[Path, ...]]:
    """Files with a quota and its period for the control groups of ``/proc/self/cgroup``."""
    before = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return group_files(own, "cpu", names=("cpu.max",), names_before=before)


def group_files(
    own: str, controller: str, *, names: tuple[str, ...], names_before: tuple[str, ...]
) -> list[tuple[Path, ...]]:
    """Files of the control groups of ``/proc/self/cgroup`` and of all groups above.

    The nearest come first; the least of their limits is what counts. A container mounts its own
    group as the root, so that the named path need not be there.

    Args:
        own: what that file says.
        controller: of what is limited.
        names: of the files that belong together, in version 2.
        names_before: in version 1.
    """
    found: list[tuple[Path, ...]] = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            groups, files = _groups(_GROUPS, path), names
        elif controller in controllers.split(","):
            mounts = dict.fromkeys((_GROUPS / controller, _GROUPS / controllers))
            groups = [group for mount in mounts for group in _groups(mount, path)]
            files = names_before
        else:
            continue
        found += [tuple(group / name for name in files) for group in groups]
    return found


def _groups(mount: Path, path: str) -> list[Path]:
    """A group and those above it, as far as they are to be seen."""
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts:  # it is outside of what this process sees as the root
        return [mount]
    return [mount / each for each in (inner, *inner.parents)]


def cores_of_quota(text: str) -> int | None:
    """Cores that a quota keeps busy, a part of one as a whole; None: there is no quota.

    Args:
        text: quota and period in microseconds, such as ``150000 100000``; ``max`` or -1 is none.
    """
    found = re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", text)
    return None if found is None else max(1, math.ceil(int(found[1]) / int(found[2])))


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


@functools.cache  # of a process, which goes on with the modules that it has loaded
def git_commit() -> str | None:
    """The commit of the checkout this package runs from, marked where it was changed.

    It is that of the moment when a process first asks, which is to be its beginning.
    """
    if named := os.environ.get("SPARSEPIPE_COMMIT"):  # of a copy whose history stayed behind
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
