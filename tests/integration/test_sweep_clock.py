"""Limits of a sweep's jobs with real jobs: what they wait for, and what is their own time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsepipe.results.files import read_json
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.record import JobRecord, records_of
from tests.support.command_line import Shell, wait_for

OURS = ("hydra/launcher=sparsepipe", "hardware.accelerator=cpu", "trainer.max_epochs=1")
BESIDE = "hydra.launcher.cores_per_rank=1"
SWEEP_S = 280  # longer than any takes

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def records(shell: Shell) -> list[JobRecord]:
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    return records_of(sweep)


def test_another_command_that_is_waited_for_too_long(shell: Shell) -> None:
    first = shell(*OURS[1:])
    with locked(RunDir(first.run)):
        swept = shell.sweep(*OURS, "hydra.launcher.wait_limit_s=3", timeout_s=SWEEP_S)
    assert swept.code == 1, swept.err
    assert "job 1 waits for another process, which does the same" in swept.err
    (record,) = records(shell)
    assert record.status == "failed"
    assert "longer than hydra.launcher.wait_limit_s=3\n" in (record.error or "")
    said = Path(record.log or "").read_text()
    assert f"another process is working on {first.run}: waiting for it" in said


def test_a_twin_is_waited_for_as_long_as_it_takes(shell: Shell) -> None:
    """The first one trains for longer than others may wait for a process that is a stranger's."""
    swept = shell.sweep(
        *OURS,
        BESIDE,
        "hydra.launcher.wait_limit_s=3",
        "data.delay_s=0.3",
        "trainer.log_every_n_steps=1,2",
        timeout_s=SWEEP_S,
    )
    assert swept.code == 0, swept.err
    assert [record.status for record in records(shell)] == ["finished", "finished"]
    assert len({record.run for record in records(shell)}) == 1


def test_who_builds_a_cache_and_who_waits_for_it_say_so(shell: Shell) -> None:
    sweep = shell.start(
        *OURS,
        BESIDE,
        "data._target_=tests.support.tinycache.CachedData",
        "seed=0,1",
        "hydra.mode=MULTIRUN",
    )
    beside = range(min(2, len(os.sched_getaffinity(0))))
    wait_for(lambda: [told(shell, number) for number in beside] == len(beside) * ["prepares"])
    (shell.cwd / "go on").touch()
    swept = shell.wait(sweep, timeout_s=SWEEP_S)
    assert swept.code == 0, swept.err
    assert [record.status for record in records(shell)] == ["finished", "finished"]
    assert [told(shell, number) for number in range(2)] == ["works", "works"]


def told(shell: Shell, number: int) -> str | None:
    """What a job is about."""
    jobs = shell.cwd.glob(f"outputs/tiny/sweeps/*/jobs/{number}/started.json")
    return next((read_json(path)["stage"] for path in jobs), None)


def test_data_that_hang_are_the_jobs_own_time(shell: Shell) -> None:
    """Those of somebody who downloads them, without a lock of the house's."""
    limit = "hydra.launcher.job_limit_s=15"
    swept = shell.sweep(*OURS, limit, "data.prepare_s=600", timeout_s=SWEEP_S)
    assert swept.code == 1, swept.err
    (record,) = records(shell)
    assert "ended by hydra.launcher.job_limit_s=15" in (record.error or "")
    assert record.seconds < 300
