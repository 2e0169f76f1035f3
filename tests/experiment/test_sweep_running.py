"""A job of a sweep while it runs: what its process gets, and when it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.experiment.sweep import running
from sparsepipe.experiment.sweep.process import JobProcess
from sparsepipe.experiment.sweep.record import JobRecord, SweptJob, record_of, write_record
from sparsepipe.experiment.sweep.running import ReadyJob, RunningJob
from sparsepipe.experiment.sweep.slots import Demand, Grant

WRITTEN_DOWN = {"_target_": "sparsepipe.cluster.Inventory.from_dict", "value": {}}
CONFIG = {"hardware": WRITTEN_DOWN, "parallel": {"grace_s": 0.0}, "force": False}
GRANT = Grant(cores=(min(os.sched_getaffinity(0)),), gpus=(), threads=1)


@pytest.fixture
def ready(tmp_path: Path) -> Callable[..., ReadyJob]:
    """Makes a job that can be started."""

    def make(**env: str) -> ReadyJob:
        job = SweptJob(number=0, overrides=("seed=0",), choices={}, sweep=tmp_path)
        return ReadyJob(job=job, config=CONFIG, demand=Demand(ranks=1, cores=1, gpus=()), env=env)

    return make


@pytest.mark.parametrize(
    ("here", "of_jobs", "threads"), [(None, {}, "1"), (None, {"OMP_NUM_THREADS": "3"}, "3"),
                                     ("4", {}, "4"), ("4", {"OMP_NUM_THREADS": "3"}, "3")],
)  # fmt: skip
def test_what_the_user_says_of_threads_counts(
    ready: Callable[..., ReadyJob],
    here: str | None,
    of_jobs: dict[str, str],
    threads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the shell, or by ``hydra.job.env_set``."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if here is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", here)
    job = RunningJob.start(ready(**of_jobs), GRANT, whole=False, limit_s=None)
    first = job.process.first
    try:
        found = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
    finally:
        job.process.kill()
        first.wait(20)
    assert f"OMP_NUM_THREADS={threads}".encode() in found


MARK = "m" * 32


def leave(ready: ReadyJob, status: str, *, mark: str) -> None:
    """As a process with this mark leaves the record of a job."""
    failed = {"error": "no space left\n  remedy: mend it", "exit_code": 3, "run": None}
    values = {"run": "there"} if status == "finished" else failed
    record = record_of(ready.job, status=status, began_s=1, ended_s=2, mark=mark, **values)
    write_record(ready.job, record)


def looked_after(ready: ReadyJob, statements: str) -> JobRecord:
    """What is said of a job whose process runs these statements; it has gone within seconds."""
    first = subprocess.Popen(
        [sys.executable, "-c", f"{statements}; print(flush=True); import time; time.sleep(300)"],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    job = RunningJob(ready=ready, grant=GRANT, process=JobProcess(first, MARK), limit_s=None)
    deadline_s = time.monotonic() + 20
    with first:
        try:
            assert first.stdout is not None
            first.stdout.readline()
            while not job.look_after(signal.SIGTERM):
                assert time.monotonic() < deadline_s, "it keeps the sweep from going on"
                time.sleep(0.01)
        finally:
            first.kill()
    return job.record()


@pytest.mark.parametrize("told", ["finished", "failed"])
def test_a_job_that_is_over_is_not_waited_for_without_end(
    ready: Callable[..., ReadyJob], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_TOLD_S", 0.1, raising=False)
    monkeypatch.setattr(running, "_LEAVING_S", 0.1)
    job = ready()
    leave(job, told, mark=MARK)
    record = looked_after(job, "import signal; signal.signal(15, signal.SIG_IGN)")
    assert record.status == told, "what it has told counts"
    if told == "failed":
        assert record.exit_code == 3
        assert (record.error or "").startswith("no space left; and it had to be ended by force")


def test_the_record_of_another_process_says_nothing_of_a_job(
    ready: Callable[..., ReadyJob],
) -> None:
    job = ready()
    leave(job, "finished", mark="of another sweep")
    record = looked_after(job, "raise SystemExit(5)")
    assert (record.status, record.exit_code, record.run) == ("failed", 5, None)
    assert "no word of why" in (record.error or "")
