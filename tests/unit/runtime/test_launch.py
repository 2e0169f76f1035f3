"""Ranks as real processes: how they are started, and that none outlives a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.runtime.failures.rank_reports import Stopped


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


@pytest.mark.parametrize(
    "names",
    [pytest.param(["SIGHUP"], marks=pytest.mark.full), ["SIGTERM", "SIGINT", "SIGHUP"]],
)
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
            from sparsepipe.runtime.failures.rank_reports import write_failure_report
            if rank:
                error = ConfigError("not like this", remedy="but like that")
                write_failure_report(error, exit_code=2, trace="")
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
    assert stop.value.unresponsive == (0, 1)


def test_nothing_is_left_beside_the_reports(
    ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    ranks("pass")
    assert not list((tmp_path / "temporary").iterdir())
