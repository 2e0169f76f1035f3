"""Ranks as real processes: how they start, end, follow their launcher, and begin again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError, OutputError, SparsePipeError, TransportError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.launch import environment_variables, launch, run_with_restarts
from tests.support.command_line import wait_for


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


@pytest.mark.parametrize(
    "names",
    [pytest.param(["SIGHUP"], marks=pytest.mark.full), ["SIGTERM", "SIGINT", "SIGHUP"]],
)
def test_ignored_signals_stop_no_rank(ranks, tmp_path: Path, names: list[str]) -> None:
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


def test_error_of_a_rank_comes_back(ranks) -> None:
    with pytest.raises(ConfigError, match="not like this") as error:
        ranks(
            """
            from sparsepipe.errors import ConfigError
            from sparsepipe.runtime.failures.rank_reports import write_failure_report
            if rank:
                error = ConfigError("not like this", remedy="but like that")
                write_failure_report(error, exit_code=2, trace="")
                sys.exit(2)
            time.sleep(60)
            """
        )
    assert error.value.remedy == "but like that"


@contextmanager
def interrupted(directory: Path, signum: int) -> Iterator[pytest.ExceptionInfo[Stopped]]:
    """Sends a signal to the launcher in the block, which it stops, once all ranks are ready."""

    def interrupt() -> None:
        while not all((directory / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped) as stop:
        yield stop
    thread.join()


def test_signal_reaches_every_rank_once(ranks, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupted(tmp_path, signal.SIGINT) as stop:
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
    assert stop.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    for rank in range(2):
        assert (tmp_path / f"signals{rank}").read_text() == "2 "


def test_ranks_that_ignore_the_signal_are_killed(ranks, tmp_path: Path) -> None:
    with interrupted(tmp_path, signal.SIGTERM) as stop:
        ranks(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            Path(f"ready{rank}").touch()
            time.sleep(60)
            """,
            grace_s=1,
        )
    assert stop.value.exit_code == 143
    assert stop.value.unresponsive == (0, 1)


STANDS = """
if rank:
    os.kill(os.getpid(), signal.SIGSTOP)
stat = Path("/proc", Path("pid1").read_text(), "stat")
while stat.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.02)  # else it could still be asked to end
from sparsepipe.runtime.failures.rank_reports import write_failure_report
Path("ending").touch()
"""


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
    ranks, tmp_path: Path, end: str, message: str
) -> None:
    with pytest.raises(SparsePipeError, match=message):
        ranks(STANDS + end)
    assert time.time() - (tmp_path / "ending").stat().st_mtime < 28


def test_a_rank_may_take_its_time_after_others_were_stopped(
    ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a checkpoint to write."""
    monkeypatch.setattr("sparsepipe.runtime.launch._PATIENCE_S", 0.5)
    with pytest.raises(Stopped):
        ranks(
            """
            from sparsepipe.runtime.failures.rank_reports import Stopped, exit_immediately
            signal.signal(signal.SIGTERM, lambda signum, frame: None)
            Path(f"heeds{rank}").touch()
            while not (Path("heeds0").exists() and Path("heeds1").exists()):
                time.sleep(0.02)  # else a rank may be ended before it can hear
            if rank == 1:
                exit_immediately(Stopped(signal.SIGTERM))
            time.sleep(3)
            Path("written").touch()
            """
        )
    assert (tmp_path / "written").exists()


LAUNCHER = """
import sys
from pathlib import Path
from sparsepipe.runtime.launch import launch
launch([sys.executable, "rank.py"], ranks=2, threads_per_rank=1, reports=Path("reports"))
"""
RANK = """
import os, signal, time
from pathlib import Path
from sparsepipe.utils.process import end_with_parent
rank = os.environ["RANK"]
end_with_parent(int(os.environ["SPARSEPIPE_LAUNCHER"]))
signal.signal(signal.SIGTERM, lambda signum, frame: Path("heard" + rank).touch())
Path("pid" + rank).write_text(str(os.getpid()))
time.sleep(120)
time.sleep(120)
"""


@pytest.mark.parametrize("how", ["killed", "asked twice"])
def test_ranks_end_with_their_launcher(tmp_path: Path, how: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=tmp_path)
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
        if how == "killed":
            launcher.kill()
        else:
            launcher.terminate()
            wait_for(lambda: all((tmp_path / f"heard{rank}").exists() for rank in range(2)))
            launcher.terminate()
        assert launcher.wait(20) == (-signal.SIGKILL if how == "killed" else 143)
        for path in pids:
            wait_for(lambda path=path: not Path(f"/proc/{path.read_text()}/cwd").exists())
    finally:
        launcher.kill()
        launcher.wait()


RESTART_PROLOGUE = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
begun = Path(f"begun{rank}")
begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
number = len(begun.read_text())
other = Path(f"begun{1 - rank}")
while not other.exists() or len(other.read_text()) < number:  # else it is ended before it begins
    time.sleep(0.02)
"""


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script in two ranks; returns how often each has begun."""
    monkeypatch.chdir(tmp_path)

    def start(script: str, *, max_restarts: int) -> None:
        path = tmp_path / "script.py"
        path.write_text(RESTART_PROLOGUE + textwrap.dedent(script))
        once = partial(
            launch,
            [sys.executable, str(path)],
            ranks=2,
            threads_per_rank=1,
            reports=tmp_path / "reports",
            grace_s=5,
        )
        run_with_restarts(once, max_restarts=max_restarts)

    return start


def begun(directory: Path) -> list[int]:
    return [len((directory / f"begun{rank}").read_text()) for rank in range(2)]


@pytest.mark.full
def test_all_ranks_begin_again_and_meet_each_other(attempts, tmp_path: Path) -> None:
    """The second attempt's ranks join a group, which the first one's dead took part in."""
    attempts(
        """
        import torch
        import torch.distributed as dist
        from sparsepipe.runtime.collectives import process_group
        process_group.join("gloo", timeout_s=30)
        value = torch.tensor([rank + 1])
        dist.all_reduce(value)
        assert value.item() == 3
        if number == 1 and rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()
        process_group.leave()
        """,
        max_restarts=1,
    )
    assert begun(tmp_path) == [2, 2]


@pytest.mark.parametrize("kind", [SparsePipeError, TransportError, ConfigError, OutputError])
def test_which_failures_may_pass(kind: type[SparsePipeError]) -> None:
    calls = []

    def fails() -> None:
        calls.append(kind)
        raise kind("it", remedy="mend it")

    with pytest.raises(kind):
        run_with_restarts(fails, max_restarts=2)
    assert len(calls) == (3 if kind in (SparsePipeError, TransportError) else 1)


NAME, OTHER, LEFT = "SPARSEPIPE_TEST_A", "SPARSEPIPE_TEST_B", "SPARSEPIPE_TEST_C"


def test_they_are_set_within_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")
    monkeypatch.delenv(OTHER, raising=False)
    monkeypatch.delenv(LEFT, raising=False)
    with environment_variables({NAME: "within", OTHER: "new"}, restored=(LEFT,)):
        assert (os.environ[NAME], os.environ[OTHER]) == ("within", "new")
        os.environ[LEFT] = "by somebody else"
    assert os.environ[NAME] == "before"
    assert OTHER not in os.environ
    assert LEFT not in os.environ
