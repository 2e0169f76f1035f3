"""Sweeps beside each other on one machine share no GPU."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.sweep import process
from sparsepipe.sweep.gpu_locks import GpuLocks, machine_wide
from sparsepipe.sweep.slots import Demand, Gpu, Grant, Machine, Slots
from tests.support.command_line import wait_for
from tests.support.paths import environment

THREE = tuple(
    Gpu(token=str(n), kind=kind, uuid=f"GPU-{n}") for n, kind in enumerate(("RTX", "RTX", "TITAN"))
)
MACHINE = Slots(machine=Machine(cores=(0, 1, 2), gpus=THREE))
ONE, BOTH = (Demand(ranks=n, cores=1, gpus=n * ("RTX",)) for n in (1, 2))
TITAN = Demand(ranks=1, cores=1, gpus=("TITAN",))
ODD = Demand(ranks=1, cores=1, gpus=("H100",))


def given(locks: GpuLocks, wanted: Demand, slots: Slots = MACHINE) -> tuple[str, ...] | None:
    """GPUs that a job gets; None where it waits."""
    grant = locks.grant(slots, wanted, number=0)
    return None if grant is None else grant.gpus


@pytest.fixture
def two(tmp_path: Path) -> tuple[GpuLocks, GpuLocks]:
    """Of two sweeps."""
    return GpuLocks(tmp_path / "locks"), GpuLocks(tmp_path / "locks")


def test_what_another_sweep_has_is_passed_over(two: tuple[GpuLocks, GpuLocks]) -> None:
    here, there = two
    assert given(here, ONE) == ("0",)
    assert given(there, ONE) == ("1",)
    assert given(there, TITAN, MACHINE.with_job(Grant(cores=(0,), gpus=("1",), threads=1))) == (
        "2",
    )


def test_all_or_none(two: tuple[GpuLocks, GpuLocks]) -> None:
    """A job that waits holds nothing for which others could wait in turn."""
    here, there = two
    slots = MACHINE.with_job(Grant(cores=(), gpus=("0",), threads=1))
    assert given(here, ONE, slots) == ("1",)
    assert given(there, BOTH) is None
    here.keep(MACHINE)
    assert given(here, BOTH) == ("0", "1")


def test_a_gpu_is_free_once_its_job_is_over(two: tuple[GpuLocks, GpuLocks]) -> None:
    here, there = two
    grant = here.grant(MACHINE, BOTH, number=0)
    assert grant is not None
    taken = MACHINE.with_job(grant)
    here.keep(taken)
    assert given(there, ONE) is None
    here.keep(taken.without_job(grant))
    assert given(there, ONE) == ("0",)
    with here:
        assert given(here, ONE) == ("1",)
    assert given(there, BOTH) == ("0", "1"), "that sweep is over"


def test_a_gpu_is_the_same_whatever_sweeps_call_it(two: tuple[GpuLocks, GpuLocks]) -> None:
    here, there = two
    seen = Machine(cores=(0,), gpus=(Gpu(token="GPU-0", kind="RTX", uuid="GPU-0"),))
    assert given(here, ONE) == ("0",)
    assert given(there, ONE, Slots(machine=seen)) is None


def test_a_job_that_takes_whatever_there_is_waits_for_all(two: tuple[GpuLocks, GpuLocks]) -> None:
    here, there = two
    assert given(here, TITAN) == ("2",)
    assert given(there, ODD) is None
    here.keep(MACHINE)
    assert given(there, ODD) == ("0", "1", "2")


def test_who_needs_no_gpu_waits_for_none(two: tuple[GpuLocks, GpuLocks]) -> None:
    here, there = two
    assert given(here, ODD) is not None
    assert given(there, Demand(ranks=1, cores=3)) == ()


def test_a_wait_is_logged_once(
    two: tuple[GpuLocks, GpuLocks],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    here, there = two
    assert given(here, TITAN) == ("2",)
    with caplog.at_level(logging.INFO):
        for number in (3, 3, 4):
            assert there.grant(MACHINE, TITAN, number=number) is None
        # Who waits for a job of its own sweep is no news.
        busy = MACHINE.with_job(Grant(cores=(0, 1, 2), gpus=(), threads=1))
        assert there.grant(busy, TITAN, number=5) is None
    waits = "waits for a GPU that another sweep holds"
    assert caplog.messages == [f"job {n} {waits} (2)" for n in (4, 5)]


def test_where_nothing_can_be_locked_sweeps_run_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    (tmp_path / "locks").write_text("no directory")
    locks = GpuLocks(tmp_path / "locks")
    with caplog.at_level(logging.WARNING):
        assert given(locks, BOTH) == ("0", "1")
        assert given(locks, BOTH) == ("0", "1")
    (message,) = caplog.messages
    assert "GPUs are not locked" in message


def test_a_sweep_within_a_job_of_a_sweep_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPUs are those that the job has."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(process.MARK_VARIABLE, raising=False)
    outer = machine_wide()
    assert given(outer, ONE) == ("0",)
    assert given(machine_wide(), ONE) == ("1",)
    monkeypatch.setenv(process.MARK_VARIABLE, "f" * 32)
    assert given(machine_wide(), ONE) == ("0",)


HOLDING = """
import sys, time
from pathlib import Path
from sparsepipe.sweep.gpu_locks import GpuLocks
from sparsepipe.sweep.slots import Demand, Gpu, Machine, Slots
machine = Machine(cores=(0,), gpus=(Gpu(token="0", kind="RTX", uuid="GPU-0"),))
locks = GpuLocks(Path(sys.argv[1]))
print(locks.grant(Slots(machine=machine), Demand(ranks=1, cores=1, gpus=("RTX",)), number=0))
sys.stdout.flush()
time.sleep(300)
"""


def test_what_a_killed_sweep_had_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    locks = GpuLocks(tmp_path)
    with other:
        try:
            assert other.stdout is not None
            assert "gpus=('0',)" in other.stdout.readline()
            assert given(locks, BOTH) is None
        finally:
            other.send_signal(signal.SIGKILL)
    assert given(locks, BOTH) == ("0", "1")


SWEEPING = """
import subprocess, sys, time
from pathlib import Path
from sparsepipe.sweep import running_job
from sparsepipe.sweep.display import Lines
from sparsepipe.sweep.gpu_locks import GpuLocks
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import SweptJob, record_of, write_record
from sparsepipe.sweep.runner import Runner
from sparsepipe.sweep.running_job import ReadyJob
from sparsepipe.sweep.slots import Demand, Gpu, Machine, Settings, Slots
from tests.support.sweep_cases import tiny_spec

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(0.5)"]

def start(job, spec, **more):  # a small process in place of a run
    values = {"status": "finished", "run": "run", "began_s": 0.0, "ended_s": 1.0}
    write_record(job, record_of(job, mark="m" * 32, **values))
    return JobProcess(subprocess.Popen(SLEEP, start_new_session=True), "m" * 32)

running_job.JobProcess.start = start
name, *needed = sys.argv[1:]
kinds = ("RTX", "TITAN")
gpus = tuple(Gpu(token=str(n), kind=kind, uuid=f"GPU-{n}") for n, kind in enumerate(kinds))
log = Path(name).open("w", buffering=1)
jobs = [
    ReadyJob(
        job=SweptJob(number=number, overrides=(f"seed={number}",), sweep=Path(f"sweep-{name}")),
        spec=tiny_spec(),
        demand=Demand(ranks=1, cores=1, gpus=tuple(each.split(","))),
    )
    for number, each in enumerate(needed)
]
runner = Runner(
    Slots(machine=Machine(cores=(0, 1), gpus=gpus)),
    settings=Settings(),
    texts={number: str(number) for number in range(len(jobs))},
    view=Lines(),
    on_start=lambda job: log.write(f"{job.number} {time.time()}\\n"),
    on_end=lambda record: log.write(f"{record.number} {time.time()} {record.status}\\n"),
    gpus=GpuLocks(Path("locks")),
)
Path(f"ready-{name}").touch()
while not Path("go").exists():
    time.sleep(0.01)
runner.run(jobs, same={}, known=[])
"""


@pytest.mark.full
def test_two_real_sweeps_use_each_gpu_in_turn(tmp_path: Path) -> None:
    """Of which some jobs want both; none waits for ever, and none uses what another has."""
    wanted = {"a": ["RTX", "RTX,TITAN"], "b": ["RTX,TITAN"]}
    sweeps = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEPING, name, *jobs],
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, jobs in wanted.items()
    ]
    try:
        wait_for(lambda: all((tmp_path / f"ready-{name}").exists() for name in wanted))
        (tmp_path / "go").touch()
        errors = [sweep.communicate(timeout=300)[1] for sweep in sweeps]
    finally:
        for sweep in sweeps:
            sweep.kill()
    assert [sweep.returncode for sweep in sweeps] == [0, 0], errors
    spans = []
    for name, jobs in wanted.items():
        lines = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        began, ended = ([e for e in lines if len(e) == n] for n in (2, 3))
        assert {number: status for number, _, status in ended} == {
            str(number): "finished" for number in range(len(jobs))
        }, errors
        ends = {number: float(end) for number, end, _ in ended}
        spans += [(name, set(jobs[int(n)].split(",")), float(t), ends[n]) for n, t in began]
    for name, kinds, began_s, ended_s in spans:
        for other, others, other_began_s, other_ended_s in spans:
            if name != other and kinds & others:
                assert ended_s <= other_began_s or other_ended_s <= began_s, spans
