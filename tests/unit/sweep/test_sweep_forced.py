"""A sweep that starts its runs anew, whichever sweeper asks for its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep import callbacks
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.record import SweptJob
from tests.support.command_line import composed

VARIABLES = tuple(f"SPARSEPIPE_SWEEP_{name}" for name in ("DIR", "COMMAND", "BEGAN", "THREADS"))


def sweep(directory: Path, count: int, *overrides: str) -> RunDir:
    """A sweep whose sweeper asks for the same point again and again, and writes no file."""
    config = OmegaConf.create(
        {"hydra": {"sweep": {"dir": str(directory)}, "overrides": {"task": list(overrides)}}}
    )
    callbacks.SweepEnd().on_multirun_start(config)
    given = composed("experiment=tiny", "trainer.max_epochs=1", "task.test=false", *overrides)
    runs = set()
    for number in range(count):
        job = SweptJob(number=number, overrides=overrides, sweep=directory)
        runs.add(run_swept(job, lambda: given, fresh_processes=False).run)
    (run,) = runs
    assert run is not None
    return RunDir(Path(run))


def test_a_point_that_is_asked_for_twice_is_anew_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Optuna asks, which leaves no ``multirun.yaml``."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(callbacks, "_running", [])
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # which a sweep sets, and is set back
    assert sweep(workplace / "first", 2).attempt == 0
    assert sweep(workplace / "second", 3, "force=true").attempt == 1
    assert sweep(workplace / "third", 2, "force=true").attempt == 2, "by each sweep"
