"""Of all that ranks report of a failure, its first cause is what the launcher raises."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sparsepipe.errors import OutputError, SparsePipeError, TransportError
from sparsepipe.runtime.failures.rank_reports import (
    REPORT_VARIABLE,
    Stopped,
    first_cause,
    write_failure_report,
)
from sparsepipe.runtime.launch import launch

KILLED = -signal.SIGKILL
ENDED = -signal.SIGTERM
REPORT_PROLOGUE = """
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
def reporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launches two ranks of a script in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def start(script: str) -> None:
        (tmp_path / "script.py").write_text(REPORT_PROLOGUE + textwrap.dedent(script))
        launch(
            [sys.executable, "script.py"],
            ranks=2,
            threads_per_rank=1,
            reports=tmp_path / "reports",
            grace_s=20,
        )

    return start


def stopped(reporting, script: str) -> Stopped:
    """What is raised when Ctrl-C comes as soon as both ranks heed it."""

    def interrupt() -> None:
        while not (Path("ready0").exists() and Path("ready1").exists()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        reporting(
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


def test_a_stop_has_the_error_that_kept_a_rank_from_saving(reporting) -> None:
    """The other, which was left alone then, has been the first to say that it stopped."""
    stop = stopped(
        reporting,
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


def explained(reports: Path, *exit_codes: int | None) -> str:
    """What is made of ranks that have ended in their order; those without a code were killed."""
    codes = {rank: code for rank, code in enumerate(exit_codes) if code is not None}
    unresponsive = [rank for rank, code in enumerate(exit_codes) if code is None]
    return str(first_cause(codes, reports, unresponsive=unresponsive))


def missing(rank: int) -> TransportError:
    error = TransportError(f"rank {rank} is gone: its connection broke", remedy="look")
    error.ranks = (rank,)
    return error


def stopped_by(cause: TransportError | None = None) -> Stopped:
    stop = Stopped(signal.SIGTERM)
    stop.__cause__ = cause
    return stop


@pytest.mark.parametrize(
    ("reports", "exit_codes", "message"),
    [
        # A rank's own error comes first, the package's own kinds of errors before others.
        ([missing(1), ValueError("mine")], [7, 1], "rank 1 raised ValueError: mine\n"),
        ([ValueError("mine"), missing(0), OutputError("full", remedy="x")], [1, 7, 1], "full\n"),
        # Then a killed rank, with what the others reported of it.
        (
            [missing(1), None],
            [7, KILLED],
            "rank 1 was killed by SIGKILL; rank 0 reported: rank 1 is gone: its connection broke; "
            "the other ranks were ended\n",
        ),
        ([None, None], [ENDED, 3], "rank 1 ended with exit code 3; the other ranks were ended\n"),
        # Then the first report of a missing rank.
        ([missing(1), missing(0), None], [7, 7, ENDED], "rank 1 is gone: its connection broke\n"),
        # But of one that has not reported itself whom it misses, if there is one.
        ([missing(1), missing(2), None], [7, 7, None], "rank 2 is gone: its connection broke\n"),
        ([missing(1), None], [7, None], "rank 1 is gone: its connection broke\n"),
        ([None, None], [0, None], "rank 1 did not answer"),
        ([None, None], [None, KILLED], "rank 1 was killed by SIGKILL"),
        # Whatever else reports what a peer's end has done to it.
        ([stopped_by(), ValueError("mine")], [143, 1], "rank 1 raised ValueError: mine\n"),
        ([stopped_by(missing(1)), None], [143, KILLED], "SIGKILL; rank 0 reported: rank 1 is gone"),
        ([missing(1), RuntimeError("connection timed out")], [7, 1], "rank 1 raised RuntimeError"),
        ([None, RuntimeError("[../gloo/pair.cc] closed")], [KILLED, 1], "rank 0 was killed by SIG"),
        ([None, missing(0)], [-signal.SIGINT, 7], "SIGINT"),  # as a stop, though it reports nothing
    ],
)
def test_the_first_cause_is_named(
    reports: list[BaseException | None],
    exit_codes: list[int | None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of the ranks is the order in which they reported."""
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path))
    for rank, error in enumerate(reports):
        if error is not None:
            monkeypatch.setattr(time, "time", lambda rank=rank: 1e9 + rank)
            monkeypatch.setenv("RANK", str(rank))
            write_failure_report(error, exit_code=1, trace="")
    assert message in explained(tmp_path, *exit_codes)


UNWRITABLE = """
import os, time
from sparsepipe.errors import DataError
from sparsepipe.runtime.failures.rank_reports import exit_immediately
if os.environ["RANK"] == "0":
    time.sleep(60)
os.environ["SPARSEPIPE_RANK_REPORTS"] = "nowhere"  # writing there raises an OSError
try:
    raise DataError("the disk is full", remedy="free space")
except DataError as error:
    exit_immediately(error)
"""


def test_errors_that_cannot_be_reported_are_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(UNWRITABLE)
    command = [sys.executable, str(tmp_path / "script.py")]
    with pytest.raises(SparsePipeError, match="rank 1 ended with exit code 3"):
        launch(command, ranks=2, threads_per_rank=1, reports=tmp_path / "reports", grace_s=5)
    printed = capfd.readouterr().err
    assert "DataError: the disk is full" in printed
    assert "remedy: free space" in printed
    assert "FileNotFoundError" not in printed
