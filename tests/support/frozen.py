"""Processes that no signal ends: the kernel holds them as it does where a driver hangs."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FREEZER = Path("/sys/fs/cgroup/freezer")
_SOON_S = 20.0


@contextlib.contextmanager
def frozen(process: int) -> Iterator[None]:
    """Holds a process and what it starts, for the time of the block; even a SIGKILL waits for that.

    Only the freezer of the first version of control groups does; skips the test where there is none
    or this machine lets nobody.
    """
    group = _FREEZER / f"sparsepipe-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no process can be frozen: {error}")
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
        _wait_until(lambda: _is_removed(group))


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # processes that have ended are still taken apart
        group.rmdir()
    return not group.exists()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, "the freezer did not do it in time"
        time.sleep(0.01)
