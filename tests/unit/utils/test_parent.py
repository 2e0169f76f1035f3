"""Processes that end with the one that has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_line import wait_for
from tests.support.paths import environment

PARENT = """
import subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "child.py", sys.argv[1]])
while not Path("over").exists():
    time.sleep(0.01)
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
from sparsepipe.utils.process import end_with_parent, outlive_parent
Path("pid").write_text(f"{os.getpid()} {os.getppid()}")
parent = os.getppid()
if sys.argv[1] == "late":
    while os.getppid() == parent:
        time.sleep(0.01)
end_with_parent(parent)
if sys.argv[1] == "outlives":
    outlive_parent()
Path("follows").touch()
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""
SPAWNED = """
import multiprocessing, os, time
from pathlib import Path
from sparsepipe.utils.process import exit_with_parent

def work():
    exit_with_parent()
    Path("pid").write_text(f"{os.getpid()} {os.getppid()}")
    Path("follows").touch()
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("forkserver").Process(target=work).start()
    time.sleep(60)
"""


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/cwd").exists()


@pytest.mark.parametrize("how", ["waits", "stopped", "late", "outlives", "spawned"])
def test_a_process_ends_with_its_parent(tmp_path: Path, how: str) -> None:
    """However it is held up, and also where the parent has ended before it looks."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(SPAWNED if how == "spawned" else PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py", how], cwd=tmp_path, env=environment())
    told = tmp_path / ("pid" if how == "late" else "follows")
    wait_for(lambda: told.exists() and len((tmp_path / "pid").read_text().split()) == 2)
    child = int((tmp_path / "pid").read_text().split()[0])
    handle = os.pidfd_open(child)
    try:
        parent.kill()
        parent.wait()
        if how == "outlives":
            with pytest.raises(AssertionError):
                wait_for(lambda: not runs(child), timeout_s=1)
        else:
            wait_for(lambda: not runs(child), timeout_s=10)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
