"""A control group with a quota of processor time, in which the kernel really grants no more."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepipe.utils.host import quota_files


@contextlib.contextmanager
def quota_group(cores: float) -> Iterator[tuple[str, ...]]:
    """Makes one, and another below it; skips the test where this machine lets nobody.

    Args:
        cores: that the quota is worth.

    Yields:
        What a command is to begin with to run in the inner one.
    """
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        own = ""  # not Linux
    place = next(iter(quota_files(own)), None)
    if place is None:
        pytest.skip("the kernel's control groups are not to be seen")
    outer = place[0].parent / f"sparsepipe-test-{uuid.uuid4().hex[:8]}"
    inner = outer / "inner"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (outer / place[0].name).write_text(f"{cores * 100_000:.0f}")
            inner.mkdir()
        except OSError as error:
            pytest.skip(f"no quota can be set: {error}")
        # The shell moves itself, and becomes the command.
        yield ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(inner))
    finally:
        for group in (inner, outer):
            if group.exists():
                group.rmdir()
