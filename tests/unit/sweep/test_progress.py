"""How far a job of a sweep is said to be, by the files that it has written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepipe.sweep.display import Lines, left_s
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import SweptJob, write_started
from sparsepipe.sweep.runner import Runner
from sparsepipe.sweep.running_job import ReadyJob, RunningJob
from sparsepipe.sweep.slots import Demand, Grant, Machine, Settings, Slots
from tests.support.sweep_cases import tiny_spec

HEAD = "epoch,step,train/loss"


@pytest.fixture
def process() -> Iterator[JobProcess]:
    """One that does nothing."""
    first = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield JobProcess(first, "nobody's mark")
    first.kill()
    first.wait(60)


class Sweep:
    """A sweep with a job of four epochs, and what the job has left."""

    def __init__(self, place: Path, process: JobProcess, *, force: bool = False) -> None:
        self.swept = SweptJob(number=0, overrides=("seed=0",), sweep=place / "sweep")
        self.run = place / "run"
        self.swept.path.mkdir(parents=True)
        self.run.mkdir()
        spec = tiny_spec(force=force, **{"trainer.max_epochs": 4})
        self.job = RunningJob(
            ready=ReadyJob(job=self.swept, spec=spec, demand=Demand(ranks=1, cores=1)),
            grant=Grant(cores=(0,), gpus=(), threads=1),
            process=process,
        )
        self.job._began_s -= 60  # a minute ago
        self.runner = Runner(
            Slots(machine=Machine(cores=(0,)), max_jobs=None),
            settings=Settings(),
            texts={0: "seed=0"},
            view=Lines(),
            on_start=lambda job: None,
            on_end=lambda record: None,
        )

    def start(self) -> None:
        write_started(self.swept, self.run, mark=None)

    def finish(self, epochs: int) -> None:
        rows = [f"{epoch},8,0.5" for epoch in range(epochs)]
        (self.run / "metrics.csv").write_text("\n".join([HEAD, *rows]) + os.linesep)

    def seen(self) -> tuple[float | None, float]:
        """The shares of the training that are done and that were when the job began."""
        going = self.runner._row(self.job).progress
        assert going is not None
        return going.share, going.share_before

    def left_s(self) -> float | None:
        going = self.runner._row(self.job).progress
        assert going is not None
        return left_s(going, None)


def test_a_fresh_training_goes_at_the_pace_of_its_first_epoch(
    tmp_path: Path, process: JobProcess
) -> None:
    sweep = Sweep(tmp_path, process)
    assert sweep.seen() == (None, 0)
    sweep.start()
    assert sweep.seen() == (None, 0), "no epoch is over"
    assert sweep.left_s() is None
    sweep.finish(1)
    assert sweep.seen() == (0.25, 0)
    assert sweep.left_s() == pytest.approx(180, rel=0.2)
    (sweep.run / "metrics.csv").write_bytes(b"\xff\n\x81\n")
    assert sweep.seen() == (0.25, 0), "a file that is no text ends no sweep"


def test_a_training_that_goes_on_goes_at_its_own_pace(tmp_path: Path, process: JobProcess) -> None:
    sweep = Sweep(tmp_path, process)
    sweep.finish(2)
    assert sweep.seen() == (None, 0), "which run it is is not known"
    sweep.start()
    assert sweep.seen() == (0.5, 0.5)
    assert sweep.left_s() is None
    sweep.finish(3)
    assert sweep.seen() == (0.75, 0.5)
    assert sweep.left_s() == pytest.approx(60, rel=0.2)


def test_a_training_anew_has_nothing_behind_it(tmp_path: Path, process: JobProcess) -> None:
    sweep = Sweep(tmp_path, process, force=True)
    sweep.finish(4)
    sweep.start()
    assert sweep.seen()[1] == 0, "of an attempt that is about to be removed"
    sweep.finish(1)
    assert sweep.seen() == (0.25, 0)
