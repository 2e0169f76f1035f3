"""Processes that cannot be ended, as where a driver hangs: whoever waits for them goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.sweep import process, running_job
from sparsepipe.sweep import runner as runner_module
from sparsepipe.sweep.display import Lines
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import SweptJob, read_record
from sparsepipe.sweep.runner import Runner
from sparsepipe.sweep.running_job import ReadyJob, RunningJob
from sparsepipe.sweep.slots import Demand, Gpu, Grant, Machine, Settings, Slots
from tests.support.control_groups import frozen
from tests.support.sweep_cases import tiny_spec

NUMBER = 2**22 + 1  # which no process has


class StuckJob(JobProcess):
    """The processes of a job, of which one stays.

    Args:
        mark: of the job.
        exit_code: of its first process, where that has ended and another one stays.
    """

    def __init__(self, mark: str, *, exit_code: int | None = None) -> None:
        self.mark, self._is_there, self._exit_code = mark, True, exit_code

    def let_go(self) -> None:
        """It is gone."""
        self._is_there = False

    def interrupt(self, signum: int) -> None:
        """It hears nothing."""

    def kill(self) -> None:
        """Nor does that end it."""

    def exit_code(self) -> int | None:
        return self._exit_code

    def alive(self) -> list[int]:
        return [NUMBER] if self._is_there else []


class StuckProcess:
    """What :class:`subprocess.Popen` gives, of a process that does not end."""

    pid = NUMBER

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.killed = False

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("it", timeout_s)

    def kill(self) -> None:
        self.killed = True


LONG_S = 30  # none of these takes so long
GRACE_S = 0.1
MARK = uuid.uuid4().hex  # of this process alone, since other workers test the same
GRANT = Grant(cores=(0,), gpus=("0",), threads=1)
ONE_GPU = Slots(machine=Machine(cores=(0,), gpus=(Gpu(token="0", kind="RTX"),)))


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadyJob, "grace_s", GRACE_S)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute takes half a second here."""
    monkeypatch.setattr(running_job, "ENDING_S", 0.5)
    monkeypatch.setattr(runner_module, "ENDING_S", 0.5)
    monkeypatch.setattr(running_job, "_CHILDREN_END_S", 0.1)


@dataclass
class Stuck:
    """A job of which a process stays until it is let go."""

    process: JobProcess
    number: int
    let_go: Callable[[], object]


def python(statements: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", statements], **more)


def really_stuck(stack: ExitStack, exit_code: int | None) -> Stuck:
    """By the kernel: a process with the mark of the job, which no signal ends."""
    held = python(
        f"import time; time.sleep({10 * LONG_S})",
        env={**os.environ, process.MARK_VARIABLE: MARK},
        start_new_session=True,
    )
    stack.callback(held.wait, LONG_S)
    stack.callback(held.kill)
    stack.enter_context(frozen(held.pid))
    first = held if exit_code is None else python(f"raise SystemExit({exit_code})")
    return Stuck(JobProcess(first, MARK), held.pid, stack.close)


def as_if_stuck(stack: ExitStack, exit_code: int | None) -> Stuck:
    double = StuckJob(MARK, exit_code=exit_code)
    return Stuck(double, NUMBER, double.let_go)


@pytest.fixture(params=[really_stuck, as_if_stuck], ids=lambda make: make.__name__)
def stuck(request: pytest.FixtureRequest, soon: None) -> Iterator[Callable[[int | None], Stuck]]:
    """Makes a job that cannot be ended; its first process has this exit code, or is the one."""
    with ExitStack() as stack:
        yield lambda exit_code=None: request.param(stack, exit_code)


def job(place: Path, number: int = 0) -> ReadyJob:
    swept = SweptJob(number=number, overrides=(f"seed={number}",), sweep=place)
    swept.path.mkdir(parents=True)
    return ReadyJob(job=swept, spec=tiny_spec(), demand=Demand(ranks=1, cores=1, gpus=("RTX",)))


def started(place: Path, process: JobProcess, **limits: float) -> RunningJob:
    return RunningJob(ready=job(place), grant=GRANT, process=process, **limits)


def runner(one: RunningJob, *others: ReadyJob, view: Lines | None = None) -> Runner:
    """A sweep in which this job runs already, and these wait."""
    found = Runner(
        ONE_GPU,
        settings=Settings(),
        texts={number: f"seed={number}" for number in range(1 + len(others))},
        view=view or Lines(),
        on_start=lambda job: None,
        on_end=lambda record: None,
    )
    # As run() does, whose jobs are all its own; this one began before.
    found._running.append(one)
    found._waiting = list(others)
    return found


def test_a_sweep_goes_on_beside_a_job_that_cannot_be_ended(
    stuck: Callable[..., Stuck], tmp_path: Path
) -> None:
    held = stuck()
    one = started(tmp_path, held.process, job_limit_s=0.1)
    sweep = runner(one, job(tmp_path, 1))
    sweep._loop([])
    assert held.process.alive() == [held.number], "it is there all the same"
    hung = sweep._records[0]
    assert hung.status == "failed"
    assert hung.ended_s - hung.began_s < LONG_S  # the next one trains after that
    left = f"process {held.number} is still running although it was killed\n"
    assert f"job_limit_s=0.1; {left}" in (hung.error or "")
    assert read_record(one.ready.job.record) == hung
    assert sweep._records[1].number == 1, "the next one had its turn"


def test_a_job_that_has_ended_and_left_what_cannot_be_ended(
    stuck: Callable[..., Stuck], tmp_path: Path
) -> None:
    """A rank, whose launcher is gone."""
    held = stuck(5)
    sweep = runner(started(tmp_path, held.process))
    sweep._loop([])
    record = sweep._records[0]
    assert (record.status, record.exit_code) == ("failed", 5)
    left = f"process {held.number} is still running although it was killed"
    assert f"left no record; {left}" in (record.error or "")


def test_a_stop_waits_for_it_no_longer(stuck: Callable[..., Stuck], tmp_path: Path) -> None:
    sweep = runner(started(tmp_path, stuck().process))
    sweep._loop([signal.SIGINT, signal.SIGINT])
    record = sweep._records[0]
    assert record.status == "stopped"
    assert "ended with the sweep; process " in (record.error or "")


def test_nor_does_a_sweep_that_breaks(stuck: Callable[..., Stuck], tmp_path: Path) -> None:
    sweep = runner(started(tmp_path, stuck().process))
    began_s = time.monotonic()
    sweep._end_what_is_left([])
    assert time.monotonic() - began_s < LONG_S
