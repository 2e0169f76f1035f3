"""How far a job of a sweep is said to be, by the files that it has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import SweptJob, write_started
from sparsepipe.sweep.running_job import ReadyJob, RunningJob
from sparsepipe.sweep.slots import Demand, Grant
from tests.support.sweep_cases import tiny_spec


def test_a_training_is_as_far_as_its_epochs(tmp_path: Path) -> None:
    swept = SweptJob(number=0, overrides=("seed=0",), sweep=tmp_path / "sweep")
    swept.path.mkdir(parents=True)
    spec = tiny_spec(**{"trainer.max_epochs": 4})
    with subprocess.Popen([sys.executable, "-c", ""]) as first:
        job = RunningJob(
            ready=ReadyJob(job=swept, spec=spec, demand=Demand(ranks=1, cores=1)),
            grant=Grant(cores=(0,), gpus=(), threads=1),
            process=JobProcess(first, "nobody's mark"),
        )
    metrics = tmp_path / "run" / "metrics.csv"
    metrics.parent.mkdir()
    assert job.share() is None, "its run is unknown"
    write_started(swept, metrics.parent, mark=None)
    assert job.share() is None, "no epoch is over"
    metrics.write_text("epoch,step\n0,8\n1,16\n")
    assert job.share() == 0.5
    metrics.write_bytes(b"\xff\n\x81\n")
    assert job.share() == 0.25, "a file that is not a text ends no sweep"
