"""A job of a sweep while it runs: what its process gets, and when it is ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sparsepipe.sweep import running_job
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import JobRecord, SweptJob, keep_record, record_of, write_started
from sparsepipe.sweep.running_job import ReadyJob, RunningJob
from sparsepipe.sweep.slots import Demand, Grant, Settings
from sparsepipe.utils.host import usable_core_numbers
from tests.support.sweep_cases import tiny_spec

ALL = usable_core_numbers()
GRANT = Grant(cores=ALL[:1], gpus=(), threads=1)
SOME, OTHERS = (str(len(ALL) + more) for more in (1, 2))
"""Threads that nobody has who says nothing."""


@pytest.fixture
def ready(tmp_path: Path) -> Callable[..., ReadyJob]:
    """Makes a job that can be started."""

    def make(**env: str) -> ReadyJob:
        job = SweptJob(number=0, overrides=("seed=0",), sweep=tmp_path)
        return ReadyJob(
            job=job, spec=tiny_spec(), demand=Demand(ranks=1, cores=1, gpus=()), env=env
        )

    return make


def environment_of(process: subprocess.Popen[bytes]) -> list[bytes]:
    """What a process was started with; the kernel tells it a moment after the start."""
    deadline_s = time.monotonic() + 20
    while not (said := Path(f"/proc/{process.pid}/environ").read_bytes()):
        assert time.monotonic() < deadline_s, "it has no environment"
        time.sleep(0.01)
    return said.split(b"\0")


@pytest.mark.parametrize(
    ("here", "of_jobs", "cores", "threads", "chosen"), [
        (None, {}, None, "1", ""), (SOME, {}, 1, SOME, SOME),
        (None, {"OMP_NUM_THREADS": OTHERS}, None, OTHERS, OTHERS),
        (SOME, {}, None, SOME, SOME), (SOME, {"OMP_NUM_THREADS": OTHERS}, None, OTHERS, OTHERS),
        # As many as there are cores have those who say nothing.
        (None, {}, 1, "1", "1" if len(ALL) > 1 else ""), (None, {}, len(ALL), f"{len(ALL)}", ""),
        (f"{len(ALL)}", {}, None, f"{len(ALL)}", ""), (f"{len(ALL)}", {}, 1, f"{len(ALL)}", ""),
    ],
)  # fmt: skip
def test_what_the_user_says_of_threads_counts(
    ready: Callable[..., ReadyJob],
    here: str | None,
    of_jobs: dict[str, str],
    cores: int | None,
    threads: str,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the shell, by ``hydra.job.env_set``, or as cores of each rank."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if here is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", here)
    settings = Settings(cores_per_rank=cores)
    grant = Grant(cores=ALL[: cores or 1], gpus=(), threads=cores or 1)
    job = RunningJob.start(ready(**of_jobs), grant, whole=False, settings=settings)
    first = job.process.first
    try:
        found = environment_of(first)
    finally:
        job.process.kill()
        first.wait(20)
    assert f"OMP_NUM_THREADS={threads}".encode() in found
    assert f"SPARSEPIPE_SWEEP_THREADS={chosen}".encode() in found, "for the run's identity"


@pytest.mark.parametrize(
    ("binds", "whole", "cores"), [(True, False, [ALL[0]]), (True, True, None), (False, False, None)]
)
def test_the_cores_that_a_job_keeps_to(
    ready: Callable[..., ReadyJob], binds: bool, whole: bool, cores: list[int] | None
) -> None:
    """None where only their number counts; its threads are as many in any case."""
    asked, grant = ready(OMP_NUM_THREADS=SOME), replace(GRANT, binds=binds)
    job = RunningJob.start(asked, grant, whole=whole, settings=Settings())
    job.process.kill()
    job.process.first.wait(20)
    assert yaml.safe_load(asked.job.file.read_text())["cores"] == cores


MARK = "m" * 32


def leave(ready: ReadyJob, status: str, *, mark: str) -> None:
    """As a process with this mark leaves the record of a job."""
    failed = {"error": "no space left\n  remedy: mend it", "exit_code": 3, "run": None}
    values = {"run": "there"} if status == "finished" else failed
    record = record_of(ready.job, status=status, began_s=1, ended_s=2, mark=mark, **values)
    keep_record(ready.job, record)


def looked_after(ready: ReadyJob, statements: str) -> JobRecord:
    """What is said of a job whose process runs these statements; it has gone within seconds."""
    first = subprocess.Popen(
        [sys.executable, "-c", f"{statements}; print(flush=True); import time; time.sleep(300)"],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    job = RunningJob(ready=ready, grant=GRANT, process=JobProcess(first, MARK))
    deadline_s = time.monotonic() + 20
    with first:
        try:
            assert first.stdout is not None
            first.stdout.readline()
            while not job.supervise():
                assert time.monotonic() < deadline_s, "it keeps the sweep from going on"
                time.sleep(0.01)
        finally:
            first.kill()
    return job.record()


@pytest.mark.parametrize("told", ["finished", "failed"])
def test_a_job_that_is_over_is_not_waited_for_without_end(
    ready: Callable[..., ReadyJob], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job, "_LINGER_S", 0.1, raising=False)
    monkeypatch.setattr(running_job, "_CHILDREN_END_S", 0.1)
    job = ready()
    leave(job, told, mark=MARK)
    record = looked_after(job, "import signal; signal.signal(15, signal.SIG_IGN)")
    assert record.status == told, "what it has told counts"
    if told == "failed":
        assert record.exit_code == 3
        assert (record.error or "").startswith("no space left; and its processes had to be ended")


def test_the_record_of_another_process_says_nothing_of_a_job(
    ready: Callable[..., ReadyJob],
) -> None:
    job = ready()
    leave(job, "finished", mark="of another sweep")
    record = looked_after(job, "raise SystemExit(5)")
    assert (record.status, record.exit_code, record.run) == ("failed", 5, None)
    assert "left no record" in (record.error or "")


def test_a_training_is_as_far_as_its_epochs(ready: Callable[..., ReadyJob], tmp_path: Path) -> None:
    asked = ready()
    asked.job.path.mkdir(parents=True)
    asked = replace(asked, spec=tiny_spec(**{"trainer.max_epochs": 4}))
    with subprocess.Popen([sys.executable, "-c", ""]) as first:
        job = RunningJob(ready=asked, grant=GRANT, process=JobProcess(first, MARK))
    metrics = tmp_path / "run" / "metrics.csv"
    metrics.parent.mkdir()
    assert job.share() is None, "its run is unknown"
    write_started(asked.job, metrics.parent, mark=None)
    assert job.share() is None, "no epoch is over"
    metrics.write_text("epoch,step\n0,8\n1,16\n")
    assert job.share() == 0.5
    metrics.write_bytes(b"\xff\n\x81\n")
    assert job.share() == 0.25, "a file that is not a text ends no sweep"
