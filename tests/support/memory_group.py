"""A control group of little memory, in which the kernel's OOM killer really ends processes."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepipe.runs.out_of_memory import counters

_LIMITS = ("memory.max", "memory.limit_in_bytes")
_SWAP = (("memory.swap.max", "0"), ("memory.memsw.limit_in_bytes", None))
_GONE_S = 20.0


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """Makes a group for the time of the block; skips the test where this machine lets nobody.

    Yields:
        What a command is to begin with to run in the group.
    """
    group = _make(limit_bytes)
    try:
        # The shell moves itself, and becomes the command.
        yield ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
    finally:
        _remove(group)


def _make(limit_bytes: int) -> Path:
    """Below the group of this process or beside it, whichever the kernel allows."""
    why = "the kernel's control groups are not to be seen"
    own = [path.parent for path in counters(Path("/proc/self/cgroup").read_text())]
    for place in dict.fromkeys([*own, *(path.parent for path in own)]):
        group = place / f"sparsepipe-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError as error:
            why = f"no control group can be made: {error}"
            continue
        try:
            _limit(group, limit_bytes)
        except OSError as error:
            why = f"no control group's memory can be limited: {error}"
            group.rmdir()
            continue
        return group
    pytest.skip(why)


def _limit(group: Path, limit_bytes: int) -> None:
    file = next((group / name for name in _LIMITS if (group / name).exists()), None)
    if file is None:
        raise OSError(f"{group} has no limit of memory")
    file.write_text(str(limit_bytes))
    for name, most in _SWAP:
        with contextlib.suppress(OSError):  # without swap there is no such file
            (group / name).write_text(most or str(limit_bytes))


def _remove(group: Path) -> None:
    deadline_s = time.monotonic() + _GONE_S
    while True:
        try:
            return group.rmdir()
        except OSError:  # processes that have ended are still taken apart
            assert time.monotonic() < deadline_s, f"{group} stays: it has processes"
            time.sleep(0.1)
