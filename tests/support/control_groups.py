"""Control groups in which the kernel really ends, slows or holds processes.

A test is skipped where this machine lets nobody make such a group.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsepipe.runs.out_of_memory import counters
from sparsepipe.utils.host import CPU_QUOTA, group_files

_IN_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'  # the shell moves itself
_FREEZER = Path("/sys/fs/cgroup/freezer")
_SOON_S = 20.0


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """A group of little memory, below that of this process or beside it, as the kernel allows.

    Yields:
        What a command is to begin with to run in the group.
    """
    own = [path.parent for path in counters()]
    for place in dict.fromkeys([*own, *(path.parent for path in own)]):
        with _made(place) as group:
            if group is not None and _limit_memory(group, limit_bytes):
                yield ("sh", "-c", _IN_GROUP, str(group))
                return
    pytest.skip("no control group of limited memory can be made")


def _limit_memory(group: Path, limit_bytes: int) -> bool:
    """Whether the group has a limit now; without swap some files do not exist."""
    limits = {"memory.max": limit_bytes, "memory.limit_in_bytes": limit_bytes}
    swap = {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": limit_bytes}
    limited = False
    for name, most in {**limits, **swap}.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(str(most))
                limited |= name in limits
    return limited


@contextlib.contextmanager
def quota_group(cores: float) -> Iterator[tuple[str, ...]]:
    """A group with a quota of processor time, worth so many cores, and another one below it.

    Yields:
        What a command is to begin with to run in the inner one.
    """
    place = next(iter(group_files("cpu", *CPU_QUOTA)), None)
    if place is None:
        pytest.skip("the kernel's control groups are not visible")
    with _made(place[0].parent) as outer:
        try:
            assert outer is not None
            (outer / place[0].name).write_text(f"{cores * 100_000:.0f}")
        except (AssertionError, OSError) as error:
            pytest.skip(f"no quota can be set: {error}")
        with _made(outer) as inner:
            yield ("sh", "-c", _IN_GROUP, str(inner))


@contextlib.contextmanager
def frozen(process: int) -> Iterator[None]:
    """Holds a process and what it starts for the time of the block; even a SIGKILL waits for that.

    Only the freezer of the first version of control groups does.
    """
    with _made(_FREEZER) as group:
        if group is None:
            pytest.skip("no process can be frozen")
        state = group / "freezer.state"
        try:
            (group / "cgroup.procs").write_text(str(process))
            state.write_text("FROZEN")
            _wait_until(lambda: state.read_text().strip() == "FROZEN")
            yield
        finally:
            state.write_text("THAWED")
            for other in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended
                    (_FREEZER / "cgroup.procs").write_text(other)


@contextlib.contextmanager
def _made(place: Path) -> Iterator[Path | None]:
    """A new group, if one can be made; it is removed once its processes have ended."""
    group = place / f"sparsepipe-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        _wait_until(lambda: _is_removed(group))


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # processes that have ended are still taken apart
        group.rmdir()
    return not group.exists()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, "the kernel did not do it in time"
        time.sleep(0.01)
