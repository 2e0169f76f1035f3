"""Of all that ranks report of a failure, its first cause is what the launcher raises."""

from __future__ import annotations

import os
import signal
import subprocess
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


@pytest.mark.parametrize("noticed", [False, True])
def test_of_two_killed_ranks_the_one_killed_as_unresponsive_is_not_blamed(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_codes = [None, KILLED]
    if noticed:
        monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path))
        monkeypatch.setenv("RANK", "2")
        error = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        assert write_failure_report(error, exit_code=1, trace="")
        exit_codes.append(1)
    assert "rank 1 was killed by SIGKILL" in explained(tmp_path, *exit_codes)


def test_a_rank_ended_from_outside_is_blamed_and_not_the_one_killed_as_unresponsive(
    tmp_path: Path,
) -> None:
    assert "rank 1 was killed by SIGTERM" in explained(tmp_path, None, ENDED)


def missing(rank: int) -> TransportError:
    error = TransportError(f"rank {rank} is gone: its connection broke", remedy="look")
    error.ranks = (rank,)
    return error


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
    ],
)
def test_the_first_cause_is_named(
    reports: list[Exception | None],
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


BUSY = """
from sparsepipe.runtime.failures.rank_reports import Stopped, write_failure_report
def leave(error, code):
    write_failure_report(error, exit_code=code, trace=f"Traceback: {error}")
    os._exit(code)
if rank:
    while not Path("busy").exists():
        time.sleep(0.02)
    leave(ValueError("the real cause"), 1)
"""


def test_cause_is_not_hidden_by_a_peer_that_was_stopped_for_it(ranks) -> None:
    """The agent's SIGTERM reaches a rank in a long step before any collective fails."""
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
signal.signal(signal.SIGTERM, lambda signum, frame: leave(Stopped(signum), 143))
Path("busy").touch()
time.sleep(60)
"""
        )


@pytest.mark.full
def test_cause_is_not_hidden_by_a_peer_that_had_to_be_killed(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("busy").touch()
time.sleep(60)
""",
            grace_s=3,
        )


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_rank_is_named_with_the_report_of_the_rank_that_missed_it(
    ranks, stopped: bool
) -> None:
    """It knows stage and minibatch, which the agent does not, also where that stops it too."""
    text = (
        r"rank 1 was killed by SIGKILL; rank 0 reported: rank 1 \(stage 1\) is gone .* minibatch 3"
    )
    with pytest.raises(TransportError, match=text):
        ranks(
            f"""
            from sparsepipe.errors import TransportError
            from sparsepipe.runtime.failures.rank_reports import Stopped
            from sparsepipe.runtime.failures.rank_reports import exit_immediately
            if rank:
                while not Path("deaf").exists():
                    time.sleep(0.02)
                Path("dies").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path("deaf").touch()
            while not Path("dies").exists():
                time.sleep(0.02)
            error = TransportError("rank 1 (stage 1) is gone ... minibatch 3", remedy="look")
            stop = Stopped(signal.SIGTERM)
            stop.__cause__ = error
            exit_immediately(stop if {stopped} else error)
            """
        )


@pytest.mark.parametrize(
    "raised",
    ["KeyError('skip_connection')", "RuntimeError('the connection to my database timed out')"],
)
def test_an_error_that_speaks_of_connections_is_a_cause(ranks, raised: str) -> None:
    """Its peer, which waited in vain, has been the first to complain."""
    script = f"""
        from sparsepipe.errors import TransportError
        from sparsepipe.runtime.failures.rank_reports import exit_immediately
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            Path("ready").touch()
            while not Path("reports/rank0.json").exists():
                time.sleep(0.02)
            exit_immediately({raised})
        while not Path("ready").exists():
            time.sleep(0.02)
        exit_immediately(TransportError("rank 1 is gone", remedy="look"))
        """
    with pytest.raises(SparsePipeError, match=r"rank 1 raised .*connection"):
        ranks(script)


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_stream_that_cannot_be_written_does_not_keep_it() -> None:
    """What clean-up there would be could wait for ever: here a thread that does not end."""
    script = """
import sys, threading
from sparsepipe.runtime.failures.rank_reports import exit_immediately
threading.Thread(target=threading.Event().wait).start()
print("so far")
error = ValueError("wrong")
error.exit_code = 9
exit_immediately(error)
"""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", script]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=full, env=buffered, timeout=60, check=False
        )
    assert ended.returncode == 9
