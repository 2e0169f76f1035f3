"""How long a job of a sweep may take, and how long it waits for another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.record import SweptJob, read_record, records_of
from tests.support.command_line import Shell, composed

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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_limits_of_a_sweep(shell: Shell) -> None:
    """One for each job, whatever it does; one for waiting for another command."""
    first = shell(*OURS[1:])
    with locked(RunDir(first.run)):
        waits = shell.sweep(*OURS, "hydra.launcher.wait_limit_s=1", timeout_s=280)
    assert waits.code == ConfigError.exit_code, waits.err
    hangs = shell.sweep(*OURS, "hydra.launcher.job_limit_s=15", "data.prepare_s=600")
    assert hangs.code == 1, hangs.err
    sweeps = sorted(shell.cwd.glob("outputs/tiny/sweeps/*"))
    (waited,), (hung,) = map(records_of, sweeps)
    assert f"another process is working on {first.run}, for longer than 1 s" in str(waited.error)
    assert f"{first.run}: waiting for it" in Path(waited.log or "").read_text()
    assert "ended by hydra.launcher.job_limit_s=15" in str(hung.error)
    assert hung.seconds < 300
