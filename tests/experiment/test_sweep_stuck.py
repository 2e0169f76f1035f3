"""Processes that cannot be ended, as where a driver hangs: whoever waits for them goes on."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from frozen import frozen

from sparsepipe.errors import HardwareError
from sparsepipe.experiment.fitting import prober
from sparsepipe.experiment.sweep import runner as runner_module
from sparsepipe.experiment.sweep import running, tree
from sparsepipe.experiment.sweep.process import JobProcess
from sparsepipe.experiment.sweep.record import SweptJob, read_record
from sparsepipe.experiment.sweep.runner import Runner
from sparsepipe.experiment.sweep.running import ReadyJob, RunningJob
from sparsepipe.experiment.sweep.slots import Demand, Gpu, Grant, Machine, Slots
from sparsepipe.experiment.sweep.view import Lines

LONG_S = 30  # none of these takes so long
GRACE_S = -9.9  # to which a job adds ten seconds
CONFIG = {"parallel": {"grace_s": GRACE_S}, "force": False, "trainer": {"max_epochs": 1}}
MARK = "f" * 32
GRANT = Grant(cores=(0,), gpus=("0",), threads=1)
ONE_GPU = Slots(machine=Machine(cores=(0,), gpus=(Gpu(token="0", kind="RTX"),)))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a minute takes half a second here."""
    monkeypatch.setattr(running, "ENDING_S", 0.5)
    monkeypatch.setattr(runner_module, "ENDING_S", 0.5)
    monkeypatch.setattr(running, "_LEAVING_S", 0.1)
    monkeypatch.setattr(prober, "_END_S", 0.5)


@pytest.fixture
def held() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes with the mark of a job which no signal ends before the test is over."""
    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", f"import time; time.sleep({10 * LONG_S})"],
                env={**os.environ, tree.MARK_VARIABLE: MARK},
                start_new_session=True,
            )
            stack.callback(process.wait, LONG_S)
            stack.callback(process.kill)
            stack.enter_context(frozen(process.pid))
            return process

        yield start


def job(place: Path, number: int = 0) -> ReadyJob:
    swept = SweptJob(number=number, overrides=(f"seed={number}",), choices={}, sweep=place)
    swept.path.mkdir(parents=True)
    return ReadyJob(job=swept, config=CONFIG, demand=Demand(ranks=1, cores=1, gpus=("RTX",)))


def started(
    ready: ReadyJob, first: subprocess.Popen[bytes], *, limit_s: float | None
) -> RunningJob:
    return RunningJob(ready=ready, grant=GRANT, process=JobProcess(first, MARK), limit_s=limit_s)


def runner(one: RunningJob, *, total: int) -> Runner:
    """A sweep in which this job runs already."""
    found = Runner(
        ONE_GPU,
        job_limit_s=None,
        texts={number: f"seed={number}" for number in range(total)},
        view=Lines(),
        began=lambda job: None,
        ended=lambda record: None,
    )
    found._slots = ONE_GPU.with_job(one.grant)
    found._running.append(one)
    return found


def test_a_sweep_goes_on_without_the_gpus_of_a_job_that_cannot_be_ended(
    held: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    first = held()
    one = started(job(tmp_path), first, limit_s=0.1)
    sweep = runner(one, total=2)
    # As run() does, whose jobs are all its own; this one began before.
    sweep._waiting = [job(tmp_path, 1)]
    began_s = time.monotonic()
    sweep._loop([])
    assert time.monotonic() - began_s < LONG_S
    assert first.poll() is None, "it is there all the same"
    hung, lost = (sweep._records[number] for number in range(2))
    assert hung.status == "failed"
    assert f"job_limit_s=0.1; process {first.pid} cannot be ended\n" in (hung.error or "")
    assert read_record(one.ready.job.record) == hung
    assert (lost.status, lost.exit_code) == ("failed", HardwareError.exit_code)
    assert "the GPUs that it takes are lost" in (lost.error or "")
    assert sweep._slots.lost == ("0",)


def test_a_job_that_has_ended_and_left_what_cannot_be_ended(
    held: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A rank, whose launcher is gone."""
    rank = held()
    first = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(5)"])
    one = started(job(tmp_path), first, limit_s=None)
    sweep = runner(one, total=1)
    sweep._loop([])
    record = sweep._records[0]
    assert (record.status, record.exit_code) == ("failed", 5)
    assert f"no word of why; process {rank.pid} cannot be ended" in (record.error or "")


def test_a_stop_waits_for_it_no_longer(
    held: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    one = started(job(tmp_path), held(), limit_s=None)
    sweep = runner(one, total=1)
    sweep._loop([signal.SIGINT, signal.SIGINT])
    record = sweep._records[0]
    assert record.status == "stopped"
    assert "ended with the sweep; process " in (record.error or "")


def test_nor_does_a_sweep_that_breaks(
    held: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    sweep = runner(started(job(tmp_path), held(), limit_s=None), total=1)
    began_s = time.monotonic()
    sweep._kill_what_is_left()
    assert time.monotonic() - began_s < LONG_S


def test_a_probe_that_cannot_be_ended_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its request without end, and is held from its start on."""
    request = tmp_path / "request"
    os.mkfifo(request)
    start = subprocess.Popen
    with ExitStack() as stack:

        def start_held(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
            process = start(*arguments, **settings)
            stack.callback(process.wait, LONG_S)
            stack.callback(process.kill)
            stack.enter_context(frozen(process.pid))
            return process

        monkeypatch.setattr(prober.subprocess, "Popen", start_held)
        with pytest.raises(HardwareError, match=r"process \d+, which tried out a batch") as told:
            prober._run(request, said=tmp_path / "said", timeout_s=0.2)
        assert "see dmesg" in told.value.remedy
        number = int(re.findall(r"process (\d+)", told.value.message)[0])
        assert Path(f"/proc/{number}").exists()
    assert pickle.loads(pickle.dumps(told.value)).remedy == told.value.remedy


def test_a_probe_that_takes_too_long_is_gone(tmp_path: Path) -> None:
    request = tmp_path / "request"
    os.mkfifo(request)
    assert prober._run(request, said=tmp_path / "said", timeout_s=0.2) is None
