"""Ranks whose launcher is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import sys
from pathlib import Path
from sparsepipe.runtime.launch import launch
launch([sys.executable, "rank.py"], ranks=1, threads_per_rank=1, reports=Path("reports"))
"""

RANK = """
import os, time
from pathlib import Path
parent = os.getppid()
Path("pid.tmp").write_text(f"{os.getpid()} {parent}")
Path("pid.tmp").replace("pid")
if LATE:
    while os.getppid() == parent:
        time.sleep(0.02)
from sparsepipe.runtime.launch import follow_parent
follow_parent(0.05)
Path("follows").touch()
time.sleep(120)
"""


def runs(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition) -> None:
    deadline_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.full), True], ids=["before", "after"]
)
def test_a_rank_ends_whenever_its_launcher_does(tmp_path: Path, late: bool) -> None:
    """Before or after the rank has come to watch it."""
    (tmp_path / "rank.py").write_text(f"LATE = {late}\n" + RANK)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=tmp_path)
    rank = None
    try:
        wait_until((tmp_path / ("pid" if late else "follows")).exists)
        rank, parent = map(int, (tmp_path / "pid").read_text().split())
        assert parent == launcher.pid, "the agent starts ranks as children of the launcher"
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not runs(rank))
    finally:
        launcher.kill()
        launcher.wait()
        if rank is not None and runs(rank):
            os.kill(rank, signal.SIGKILL)
