"""Ranks that cannot hear that they should end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.failures.unresponsive_ranks import _kill
from sparsepipe.runtime.launch import launch

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from sparsepipe.runtime.failures.unresponsive_ranks import announce_process
from sparsepipe.runtime.failures.rank_reports import write_failure_report
rank = int(os.environ["RANK"])
Path(f"pid{rank}").write_text(str(os.getpid()))
announce_process()
if rank:
    os.kill(os.getpid(), signal.SIGSTOP)
while not Path("reports/rank1.pid").exists():
    time.sleep(0.02)
stat = Path("/proc", Path("reports/rank1.pid").read_text(), "stat")
while stat.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.02)  # else it could still be asked to end
Path("ending").touch()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 0 was killed by SIGKILL"),
        (
            "write_failure_report(ValueError('mine'), exit_code=1, trace=''); sys.exit(1)",
            "rank 0 raised ValueError: mine",
        ),
    ],
    ids=["killed", "raises"],
)
def test_a_stopped_rank_is_ended_soon_after_another_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT + end)
    with pytest.raises(SparsePipeError, match=message):
        launch(
            [sys.executable, "script.py"], ranks=2, threads_per_rank=1, reports=tmp_path / "reports"
        )
    # The agent alone would wait for half a minute.
    assert time.time() - (tmp_path / "ending").stat().st_mtime < 28
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


@pytest.mark.full
def test_a_rank_may_take_its_time_after_others_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a checkpoint to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparsepipe.runtime.failures.unresponsive_ranks._PATIENCE_S", 0.5)
    (tmp_path / "script.py").write_text(
        """
import os, signal, time
from pathlib import Path
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.failures.unresponsive_ranks import announce_process
from sparsepipe.runtime.failures.rank_reports import exit_immediately
announce_process()
signal.signal(signal.SIGTERM, lambda signum, frame: None)
Path("heeds" + os.environ["RANK"]).touch()
while not (Path("heeds0").exists() and Path("heeds1").exists()):
    time.sleep(0.02)  # else the agent may end a rank before it can hear
if os.environ["RANK"] == "1":
    exit_immediately(Stopped(signal.SIGTERM))
time.sleep(3)
Path("written").touch()
"""
    )
    with pytest.raises(BaseException, match="SIGTERM"):
        launch(
            [sys.executable, "script.py"], ranks=2, threads_per_rank=1, reports=tmp_path / "reports"
        )
    assert (tmp_path / "written").exists()


def test_a_rank_reaped_by_another_waiter_does_not_end_the_watch(tmp_path: Path) -> None:
    """The agent may do so between the look at a rank and its end; others are ended still."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        _kill([gone.pid, stopped.pid])
        assert stopped.wait(20) == -signal.SIGKILL
    finally:
        stopped.kill()
        stopped.wait()
