"""What whoever started the ranks makes of their last words."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sparsepipe.errors import OutputError, SparsePipeError
from sparsepipe.runtime.failures.rank_reports import (
    REPORT_VARIABLE,
    Stopped,
    first_cause,
    unresponsive_mark,
    write_failure_report,
)
from sparsepipe.runtime.launch import launch

PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
from sparsepipe.errors import ConfigError, OutputError, SparsePipeError, TransportError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.failures.rank_reports import exit_immediately
rank = int(os.environ["RANK"])
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launches two ranks of a script in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def start(script: str) -> None:
        (tmp_path / "script.py").write_text(PROLOGUE + textwrap.dedent(script))
        launch(
            [sys.executable, "script.py"],
            ranks=2,
            threads_per_rank=1,
            reports=tmp_path / "reports",
            grace_s=20,
        )

    return start


def stopped(ranks, script: str) -> Stopped:
    """What is raised when Ctrl-C comes as soon as both ranks heed it."""

    def interrupt() -> None:
        while not (Path("ready0").exists() and Path("ready1").exists()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        ranks(
            """
            heard = []
            signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
            Path(f"ready{rank}").touch()
            while not heard:
                time.sleep(0.02)
            """
            + script
        )
    thread.join()
    return stop.value


def test_a_stop_tells_what_kept_a_rank_from_saving(ranks) -> None:
    """The other, which was left alone then, has been the first to say that it stopped."""
    stop = stopped(
        ranks,
        """
            if rank:
                stop = Stopped(signal.SIGINT)
                stop.__cause__ = TransportError("rank 0 is gone", remedy="look")
                exit_immediately(stop)
            wait_for("reports/rank1.json")
            exit_immediately(OutputError("the disk is full", remedy="free space"))
        """,
    )
    assert stop.signum == signal.SIGINT
    assert isinstance(stop.save_error, OutputError)
    assert (stop.save_error.message, stop.save_error.remedy) == ("the disk is full", "free space")


def test_a_stop_in_good_order_tells_of_nothing(ranks) -> None:
    stop = stopped(
        ranks,
        """
            stop = Stopped(signal.SIGINT)
            if rank:
                stop.__cause__ = TransportError("rank 0 is gone", remedy="look")
            exit_immediately(stop)
        """,
    )
    assert stop.save_error is None
    assert stop.exit_code == 130


def test_a_killed_rank_is_not_said_to_hang_where_the_launcher_looks_late(ranks) -> None:
    """The other one's clock makes it some seconds, as a busy machine does."""
    with pytest.raises(SparsePipeError, match="rank 1 was killed by SIGKILL; noticed by rank 0"):
        ranks(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(f"deaf{rank}").touch()
            wait_for(f"deaf{1 - rank}")
            if rank:
                wait_for("reports/rank0.json")
                os.kill(os.getpid(), signal.SIGKILL)
            now = time.time
            time.time = lambda: now() - 10
            error = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")
            error.add_note("batch 4")
            exit_immediately(error)
            """
        )


def explained(reports: Path, *exit_codes: int) -> str:
    """What is made of ranks that the agent finds dead in one look, so that all have one time."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(exit_codes)
    }
    for failure in failures.values():
        failure.timestamp = 1_000_000_000
    return str(first_cause(ChildFailedError("ranks", failures), reports))


@pytest.mark.parametrize("noticed", [False, True])
def test_of_two_killed_ranks_the_one_killed_for_lingering_is_not_blamed(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unresponsive_mark(tmp_path, 0).touch()
    exit_codes = [-signal.SIGKILL, -signal.SIGKILL]
    if noticed:
        monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path))
        monkeypatch.setenv("RANK", "2")
        error = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        assert write_failure_report(error, exit_code=1, trace="")
        exit_codes.append(1)
    assert "rank 1 was killed by SIGKILL" in explained(tmp_path, *exit_codes)


def test_a_rank_ended_from_outside_is_blamed_and_not_the_one_killed_for_lingering(
    tmp_path: Path,
) -> None:
    unresponsive_mark(tmp_path, 0).touch()
    assert "rank 1 was killed by SIGTERM" in explained(tmp_path, -signal.SIGKILL, -signal.SIGTERM)
