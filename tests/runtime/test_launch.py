"""Ranks as real processes: how they are started, and that none outlives a failure."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError, SparsePipeError, TransportError
from sparsepipe.runtime.launch import Stopped, launch

PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"pid{rank}").write_text(str(os.getpid()))
while not all(Path(f"pid{r}").exists() and Path(f"pid{r}").read_text() for r in range(2)):
    time.sleep(0.02)  # else the agent may end a rank before it has begun
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Launches two ranks of a script in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def start(script: str, *, grace_s: float = 60) -> None:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        launch(
            [sys.executable, str(path)],
            ranks=2,
            threads_per_rank=3,
            reports=tmp_path / "reports",
            grace_s=grace_s,
        )

    yield start
    for rank in range(2):
        pid = int((tmp_path / f"pid{rank}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_environment(ranks, tmp_path: Path) -> None:
    ranks(
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
        Path(f"out{rank}").write_text(" ".join(os.environ[name] for name in names))
        """
    )
    assert (tmp_path / "out0").read_text() == "0 0 2 127.0.0.1 3"
    assert (tmp_path / "out1").read_text() == "1 1 2 127.0.0.1 3"
    assert "LOCAL_RANK" not in os.environ
    assert "OMP_NUM_THREADS" not in os.environ


def test_killed_rank_is_named(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 was killed by SIGKILL"):
        ranks("os.kill(os.getpid(), 9) if rank else time.sleep(60)")


def test_a_rank_that_was_terminated_before_it_could_tell_is_named(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 was killed by SIGTERM"):
        ranks("os.kill(os.getpid(), signal.SIGTERM) if rank else time.sleep(60)")


@pytest.mark.parametrize("names", [["SIGHUP"], ["SIGTERM", "SIGINT", "SIGHUP"]])
def test_ignored_signals_stop_nobody(ranks, tmp_path: Path, names: list[str]) -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        for name in names:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        ranks(
            f"""
            if rank == 0:
                for name in {names}:
                    os.kill(os.getppid(), getattr(signal, name))
                time.sleep(0.5)
            Path(f"out{{rank}}").touch()
            """
        )
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
    assert all((tmp_path / f"out{rank}").exists() for rank in range(2))


def test_exit_code_is_named(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 ended with exit code 3"):
        ranks("sys.exit(3) if rank else time.sleep(60)")


def test_error_of_a_rank_comes_back(ranks) -> None:
    with pytest.raises(ConfigError, match="not like this") as error:
        ranks(
            """
            from sparsepipe.errors import ConfigError
            from sparsepipe.runtime.launch import report_failure
            if rank:
                error = ConfigError("not like this", remedy="but like that")
                report_failure(error, exit_code=2, trace="")
                sys.exit(2)
            time.sleep(60)
            """
        )
    assert error.value.remedy == "but like that"


def test_signal_reaches_every_rank_once(ranks, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped) as stop:
        ranks(
            """
            def note(signum, frame):
                with open(f"signals{rank}", "a") as file:
                    file.write(f"{signum} ")
            signal.signal(signal.SIGINT, note)
            Path(f"ready{rank}").touch()
            while not Path(f"signals{rank}").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            """
        )
    thread.join()
    assert stop.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    for rank in range(2):
        assert (tmp_path / f"signals{rank}").read_text() == "2 "


def test_ranks_that_ignore_the_signal_are_killed(ranks, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        ranks(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            Path(f"ready{rank}").touch()
            time.sleep(60)
            """,
            grace_s=1,
        )
    thread.join()
    assert stop.value.exit_code == 143
    assert stop.value.unheard == (0, 1)


BUSY = """
from sparsepipe.runtime.launch import Stopped, report_failure
def leave(error, code):
    report_failure(error, exit_code=code, trace=f"Traceback: {error}")
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


@pytest.mark.full  # the agent waits half a minute before it kills
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


def test_a_rank_that_names_a_peer_gives_way_to_that_peers_own_word(ranks) -> None:
    with pytest.raises(SparsePipeError, match="rank 1 raised ValueError: the real cause"):
        ranks(
            BUSY
            + """
from sparsepipe.errors import TransportError
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("busy").touch()
while not Path("reports/rank1.json").exists():
    time.sleep(0.02)
leave(TransportError("rank 1 is gone", remedy="look"), 7)
"""
        )


@pytest.mark.parametrize("stopped", [False, True])
def test_a_dead_rank_is_told_of_by_the_one_that_missed_it(ranks, stopped: bool) -> None:
    """It knows stage and minibatch, which the agent does not, also where that stops it too."""
    with pytest.raises(TransportError, match=r"rank 1 \(stage 1\) is gone .* minibatch 3"):
        ranks(
            f"""
            from sparsepipe.errors import TransportError
            from sparsepipe.runtime.reports import Stopped
            from sparsepipe.runtime.leaving import abandon
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
            abandon(stop if {stopped} else error)
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
        from sparsepipe.runtime.leaving import abandon
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            Path("ready").touch()
            while not Path("reports/rank0.json").exists():
                time.sleep(0.02)
            abandon({raised})
        while not Path("ready").exists():
            time.sleep(0.02)
        abandon(TransportError("rank 1 is gone", remedy="look"))
        """
    with pytest.raises(SparsePipeError, match=r"rank 1 raised .*connection"):
        ranks(script)


def test_the_word_of_the_rank_that_is_blamed_is_shown(ranks) -> None:
    """It was the second to tell, and knows better."""
    script = """
        from sparsepipe.errors import TransportError
        from sparsepipe.runtime.leaving import abandon
        from sparsepipe.runtime.meeting import blaming
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank:
            Path("ready").touch()
            while not Path("reports/rank0.json").exists():
                time.sleep(0.02)
            abandon(blaming(2, "rank 2 is gone", remedy="look"))
        while not Path("ready").exists():
            time.sleep(0.02)
        abandon(blaming(1, "rank 1 is gone", remedy="look"))
        """
    with pytest.raises(TransportError, match="rank 2 is gone"):
        ranks(script)


def test_nothing_is_left_beside_the_reports(
    ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    ranks("pass")
    assert not list((tmp_path / "temporary").iterdir())
