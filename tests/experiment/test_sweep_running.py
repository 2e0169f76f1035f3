"""A job of a sweep while it runs: what its process gets, and when it is ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.experiment.sweep.record import SweptJob
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
