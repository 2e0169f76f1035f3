"""How long a job of a sweep may take, and how long it waits for another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.record import SweptJob, read_record
from tests.support.command_line import composed
from tests.support.paths import environment

TINY = ("experiment=tiny", "trainer.max_epochs=1", "task.test=false")
OURS = ("hydra/launcher=sparsepipe", "hardware.accelerator=cpu", "trainer.max_epochs=1")


def test_a_job_waits_for_a_while_and_fails(
    tmp_path: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = SweptJob(number=0, overrides=("seed=0",), sweep=tmp_path / "sweep")
    config = composed(*TINY)
    done = run_swept(job, lambda: config, fresh_processes=False)
    with (
        locked(RunDir(Path(done.run or ""))),
        pytest.raises(ConfigError, match=r"another process is working on .* longer than 0.3 s"),
    ):
        run_swept(job, lambda: config, fresh_processes=False, wait_s=0.3)
    record = read_record(job.record)
    assert (record.status, record.exit_code) == ("failed", ConfigError.exit_code)
    assert "remedy: wait for it or end it, then run the command again" in (record.error or "")


def test_torch_is_imported_after_the_choice_of_cores() -> None:
    """It counts the cores of its process when it is imported."""
    statements = "import sys, sparsepipe.sweep.job; raise SystemExit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", statements], env=environment(), check=False)
    assert done.returncode == 0


def test_a_job_that_can_write_no_files_runs_all_the_same(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="sparsepipe")
    job = SweptJob(number=0, overrides=(), sweep=workplace / "sweep")
    job.path.parent.mkdir(parents=True)
    job.path.touch()  # a file in the place of a directory
    plan = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
    found = run_swept(job, lambda: composed("experiment=tiny", *plan), fresh_processes=False)
    assert (Path(found.run or "") / "DONE.json").exists()
    assert "cannot follow this job" in caplog.text
    assert "cannot be written" in caplog.text
