"""A sweep goes on whatever becomes of its terminal, its output and its disk."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.sweep import process, record, running_job
from sparsepipe.sweep.display import JobRow, Lines, LiveView, SweepState
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import JobRecord, SweptJob, record_of, records_of
from sparsepipe.sweep.runner import Runner
from sparsepipe.sweep.running_job import ReadyJob
from sparsepipe.sweep.slots import Demand, Machine, Settings, Slots
from tests.support.command_line import Shell, wait_for
from tests.support.sweep_cases import tiny_spec

JOB = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.signal(signal.SIGHUP, lambda *_: asked.append(1))
place = pathlib.Path(sys.argv[1])
(place / "hears").touch()
while not asked and not (place.parent / "go").exists():
    time.sleep(0.01)
time.sleep(0.5)  # as long as a checkpoint takes
(place / "whole").touch()
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs are small processes, which end when they are asked or may, and then are whole."""
    started, real = [], JobProcess.start

    def start(job: SweptJob, config: Any, **more: Any) -> JobProcess:
        if job.path.is_file():
            return real(job, config, **more)  # which fails
        job.path.mkdir(parents=True, exist_ok=True)
        first = subprocess.Popen(
            [sys.executable, "-S", "-c", JOB, str(job.path)], start_new_session=True
        )
        started.append(first)
        return JobProcess(first, f"{job.number}" * 32)

    monkeypatch.setattr(running_job.JobProcess, "start", start)
    yield
    for first in started:
        assert first.returncode is not None, "a process is left"


def jobs(place: Path) -> list[ReadyJob]:
    demand = Demand(ranks=1, cores=1, gpus=())
    swept = [SweptJob(number=n, overrides=(f"seed={n}",), sweep=place) for n in range(2)]
    return [ReadyJob(job=job, spec=tiny_spec(grace_s=600.0), demand=demand) for job in swept]


def runner(
    view: Lines, *, ended: Callable[[JobRecord], object] = lambda record: None, **more: Any
) -> Runner:
    return Runner(
        Slots(machine=Machine(cores=(0, 1), gpus=())),
        settings=Settings(),
        texts={number: f"seed={number}" for number in range(5)},
        view=view,
        on_start=lambda job: None,
        on_end=ended,
        **more,
    )


def whole(place: Path) -> list[bool]:
    """Whether each job came to its end, and was not killed before."""
    return [(place / "jobs" / str(number) / "whole").exists() for number in range(2)]


class Doing(Lines):
    """Does something once both jobs hear."""

    def __init__(self, place: Path, act: Callable[[], object]) -> None:
        self.act, self.hears = act, [place / "jobs" / str(n) / "hears" for n in range(2)]
        self.done = False

    def show(self, state: Callable[[], SweepState]) -> None:
        if not self.done and all(path.exists() for path in self.hears):
            self.done = True
            self.act()


class Terminal(LiveView):
    """A live table in a terminal that goes once both jobs hear."""

    def __init__(self, console: Console, then: Doing) -> None:
        super().__init__(console)
        self.then = then

    def show(self, state: Callable[[], SweepState]) -> None:
        self.then.show(state)
        self._draw(state())


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_terminal_that_goes_ends_no_job(
    hangs_up: bool, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel tells the sweep of it, jobs are asked to end and have their grace."""
    ours, theirs = pty.openpty()

    def go() -> None:
        os.close(ours)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):  # nobody is there any more
            os.write(theirs, b"?")
        if hangs_up:
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            (tmp_path / "jobs" / "go").touch()

    with os.fdopen(theirs, "w", closefd=False) as stream, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", stream)
        console = Console(file=stream, force_terminal=True)
        sweep = runner(Terminal(console, Doing(tmp_path, go)))
        if hangs_up:
            with pytest.raises(Stopped):
                sweep.run(jobs(tmp_path), same={}, known=[])
        else:
            sweep.run(jobs(tmp_path), same={}, known=[])
        assert sys.stdout is stream, "it is given back"
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)  # for what is left to be written
    os.close(theirs)
    assert whole(tmp_path) == [True, True]
    expected = "stopped" if hangs_up else "failed"  # these say nothing of themselves
    assert [one.status for one in records_of(tmp_path)] == 2 * [expected]
    assert not any("SIGKILL" in (one.error or "") for one in records_of(tmp_path))


def test_jobs_whose_turn_never_came_have_a_record(small: None, tmp_path: Path) -> None:
    """Those of an earlier part of a search count as well, and none that has not begun as done."""
    states: list[str] = []

    class Watching(Doing):
        def ended(self, row: JobRow, state: Callable[[], SweepState]) -> None:
            states.append(state().summary)

    last = SweptJob(number=4, overrides=("seed=3",), sweep=tmp_path)
    twin = SweptJob(number=3, overrides=("seed=3",), sweep=tmp_path)
    first, second = jobs(tmp_path)
    waits = replace(second, job=last, demand=Demand(ranks=1, cores=2, gpus=()))
    done = {"status": "finished", "run": "x", "began_s": 0.0, "ended_s": 1.0}
    earlier = [record_of(replace(last, number=2), **done)]
    sweep = runner(
        Watching(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM)), earlier=earlier, total=9
    )
    with pytest.raises(Stopped):
        sweep.run([first, second, waits], same={4: [twin]}, known=[])
    assert [(one.number, one.status) for one in records_of(tmp_path)] == [
        (0, "stopped"), (1, "stopped"), (3, "not started"), (4, "not started"),
    ]  # fmt: skip
    assert states[-1] == "1 of 9 jobs done, 2 stopped"


def broken() -> None:
    raise KeyError("somebody's own mistake")


def test_a_view_that_breaks_is_shown_no_more(small: None, tmp_path: Path) -> None:
    def act() -> None:
        (tmp_path / "jobs" / "go").touch()
        broken()

    found = runner(Doing(tmp_path, act)).run(jobs(tmp_path), same={}, known=[])
    assert whole(tmp_path) == [True, True]
    assert sorted(found) == [0, 1]


def test_what_breaks_a_sweep_lets_its_jobs_end(small: None, tmp_path: Path) -> None:
    """They are asked, and have their grace."""
    sweep = runner(Doing(tmp_path, lambda: setattr(sweep, "_start_what_fits", broken)))
    with pytest.raises(KeyError, match="own mistake"):
        sweep.run(jobs(tmp_path), same={}, known=[])
    assert whole(tmp_path) == [True, True]


@pytest.mark.timeout(120)  # which is less than the grace
def test_a_signal_ends_the_grace_of_a_sweep_that_breaks(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: JobProcess, signum: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # of a person who does not wait

    monkeypatch.setattr(process.JobProcess, "interrupt", ask)
    sweep = runner(Doing(tmp_path, lambda: setattr(sweep, "_start_what_fits", broken)))
    with pytest.raises(KeyError):
        sweep.run(jobs(tmp_path), same={}, known=[])
    assert whole(tmp_path) == [False, False]


def test_a_job_that_has_no_directory_fails_alone(small: None, tmp_path: Path) -> None:
    """The one beside it runs on to its end; what is the same as it shares its record."""
    (tmp_path / "jobs").mkdir()
    for number in (1, 2):
        (tmp_path / "jobs" / str(number)).write_text("a file in the place of a directory")
    twin = SweptJob(number=2, overrides=("seed=1",), sweep=tmp_path)
    sweep = runner(Lines(), ended=lambda record: (tmp_path / "jobs" / "go").touch())
    found = sweep.run(jobs(tmp_path), same={1: [twin]}, known=[])
    assert whole(tmp_path) == [True, False]
    assert "cannot be written" in (found[1].error or "")
    assert found[2].error == found[1].error
    assert records_of(tmp_path) == [found[0]], "the others could not be written"
    assert record.read_record(tmp_path / "jobs" / "0" / "record.json") == found[0]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_nobody_reads_what_a_sweep_says(shell: Shell) -> None:
    """As behind ``| head -0``: all jobs are done, and the exit code is theirs."""
    sweep = shell.start(
        "hydra/launcher=sparsepipe", "trainer.max_epochs=1", "hardware.accelerator=cpu",
        "hydra.mode=MULTIRUN",
    )  # fmt: skip
    assert sweep.stdout is not None
    sweep.stdout.close()
    sweep.stdout = None
    ended = shell.wait(sweep, timeout_s=400)
    assert ended.code == 0, ended.err
    assert "standard output is gone, but the sweep goes on" in ended.err
    (place,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    assert [one.status for one in records_of(place)] == ["finished"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_terminal_that_hangs_up_lets_jobs_write_their_checkpoints(shell: Shell) -> None:
    stuck = "callbacks={stuck: {_target_: tests.support.tinyhouse.LongStep, step: 1}}"
    number, ours = pty.fork()
    if not number:
        os.chdir(shell.cwd)
        words = [sys.executable, "-m", *shell.command(
            "hydra/launcher=sparsepipe", stuck, "parallel.grace_s=1", "hydra.mode=MULTIRUN",
        )]  # fmt: skip
        os.execve(sys.executable, words, {**shell.environment, "TERM": "xterm"})
    reads = time.monotonic() + 300
    while not (shell.cwd / "in-step-0").exists():
        assert time.monotonic() < reads
        os.set_blocking(ours, False)
        try:
            os.read(ours, 100_000)
        except BlockingIOError:
            time.sleep(0.02)
    os.close(ours)
    ended: list[int] = []
    wait_for(lambda: ended.extend(os.waitpid(number, os.WNOHANG)) or ended[-2] == number)
    (place,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    assert [one.status for one in records_of(place)] == ["stopped"]
