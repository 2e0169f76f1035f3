"""What a job of a sweep waits for, for how long at most, and that this is not its own time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from experiment_harness import Shell, composed, wait_for

from sparsepipe.errors import ConfigError
from sparsepipe.experiment.lock import locked
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.sweep.one_job import run_swept
from sparsepipe.experiment.sweep.process import JobProcess
from sparsepipe.experiment.sweep.progress import Doing, doing, working_s
from sparsepipe.experiment.sweep.record import SweptJob, read_record, records_of
from sparsepipe.experiment.sweep.running import ReadyJob, RunningJob
from sparsepipe.experiment.sweep.slots import Demand, Grant
from sparsepipe.results.files import read_json, write_json

CONFIG = {"hardware": {}, "parallel": {"grace_s": 0.0}, "force": False}
TINY = ("experiment=tiny", "trainer.max_epochs=1", "task.test=false")
NOT_ITS_OWN = pytest.mark.parametrize(
    ("stage", "then"), [("waits", "has waited"), ("prepares", "found")]
)


@pytest.mark.parametrize(
    ("stage", "for_s", "wait_limit_s", "expected"),
    [
        ("prepares", 50, None, 0),
        ("prepares", 50, 60, 0),
        ("prepares", 80, 60, 20),
        ("found", 50, 60, 50),
        ("waits", 50, None, 0),
        ("waits", 80, 60, 20),
        ("has waited", 50, 60, 50),
    ],
)
def test_what_of_a_jobs_time_is_work(
    stage: str, for_s: float, wait_limit_s: float | None, expected: float
) -> None:
    now = Doing(stage=stage, for_s=for_s)
    assert working_s(now, elapsed_s=100, wait_limit_s=wait_limit_s) == expected


def test_a_job_that_tells_nothing_works() -> None:
    assert working_s(None, elapsed_s=100, wait_limit_s=10) == 100


@pytest.fixture
def job(tmp_path: Path) -> SweptJob:
    return SweptJob(number=0, overrides=("seed=0",), choices={}, sweep=tmp_path / "sweep")


@contextmanager
def running(
    job: SweptJob, *, limit_s: float, wait_limit_s: float | None = None
) -> Iterator[RunningJob]:
    """A job whose process sleeps."""
    job.path.mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
    )
    ready = ReadyJob(
        job=job, config=CONFIG, demand=Demand(ranks=1, cores=1), wait_limit_s=wait_limit_s
    )
    process = JobProcess(first, "m" * 32)
    try:
        yield RunningJob(
            ready=ready,
            grant=Grant(cores=(0,), gpus=(), threads=1),
            process=process,
            limit_s=limit_s,
        )
    finally:
        first.kill()
        first.wait(20)


def tell(job: SweptJob, stage: str, *, ago_s: float = 0.0) -> None:
    write_json(job.started, {"run": "there", "stage": stage, "since_s": time.time() - ago_s})


def look_until_it_is_gone(job: RunningJob) -> None:
    while not job.look_after(signal.SIGTERM):
        assert job.elapsed_s < 30, "it has no limit"
        time.sleep(0.01)


@NOT_ITS_OWN
def test_what_others_need_as_well_is_not_the_jobs_own_time(
    job: SweptJob, stage: str, then: str
) -> None:
    """The limit counts from the moment when its data are ready and it has its run to itself."""
    with running(job, limit_s=0.2) as one:
        tell(job, stage)
        while one.elapsed_s < 3 * 0.2:
            assert not one.look_after(signal.SIGTERM)
            time.sleep(0.01)
        assert one.process.exit_code() is None
        tell(job, then)
        look_until_it_is_gone(one)
        assert "ended by hydra.launcher.job_limit_s=0.2" in (one.record().error or "")


@NOT_ITS_OWN
def test_nor_does_it_last_without_end(job: SweptJob, stage: str, then: str) -> None:
    del then
    with running(job, limit_s=0.2, wait_limit_s=50) as one:
        tell(job, stage, ago_s=60)
        look_until_it_is_gone(one)


def test_that_a_job_waits_is_told_once(job: SweptJob) -> None:
    with running(job, limit_s=100) as one:
        told = []
        for stage in ("prepares", "waits", "waits", "has waited", "waits"):
            tell(job, stage)
            one._looked_s = -100.0  # a while ago
            told.append(one.begins_to_wait())
            assert one.now is not None
            assert one.now.stage == stage
        assert told == [False, True, False, False, True]
        tell(job, "has waited")
        assert not one.begins_to_wait(), "it has just looked"
        assert one.now.stage == "waits"


@pytest.fixture
def tiny(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *more: composed(*TINY, *more)


def stage(job: SweptJob) -> str | None:
    now = doing(job)
    return None if now is None else now.stage


def test_a_job_tells_what_it_is_about(job: SweptJob, tiny: Callable[..., dict[str, Any]]) -> None:
    config = tiny("data.prepare_s=1")
    seen: list[bool] = []

    def look() -> None:
        wait_for(lambda: stage(job) == "prepares")
        seen.append("run" in read_json(job.started))

    thread = threading.Thread(target=look)
    thread.start()
    done = run_swept(job, lambda: config, fresh_processes=False)
    thread.join(60)
    assert seen == [False], "while its data are made ready, it is not known"
    told = read_json(job.started)
    assert (told["stage"], told["run"]) == ("found", done.run)


def test_a_job_tells_that_it_waits_and_that_this_is_over(
    job: SweptJob, tiny: Callable[..., dict[str, Any]]
) -> None:
    config = tiny()
    done = run_swept(job, lambda: config, fresh_processes=False)
    other = ExitStack()
    other.enter_context(locked(RunDir(Path(done.run or ""))))

    def let_go_once_it_waits() -> None:
        with other:
            wait_for(lambda: stage(job) == "waits")

    thread = threading.Thread(target=let_go_once_it_waits)
    thread.start()
    assert run_swept(job, lambda: config, fresh_processes=False).before
    thread.join(60)
    assert stage(job) == "has waited"


def test_a_job_waits_for_a_while_and_fails(
    job: SweptJob, tiny: Callable[..., dict[str, Any]]
) -> None:
    config = tiny()
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
def test_a_sweep_says_that_a_job_waits_and_ends_when_it_waits_too_long(shell: Shell) -> None:
    asked = ("trainer.max_epochs=1", "hardware.accelerator=cpu")
    first = shell(*asked)
    limit = "hydra.launcher.wait_limit_s=6"
    with locked(RunDir(first.run)):
        swept = shell.sweep("hydra/launcher=sparsepipe", *asked, limit, timeout_s=280)
    assert swept.code == ConfigError.exit_code, swept.err
    assert "job 1 waits for another process, which works on the same run" in swept.err
    assert f"another process is working on {first.run}, for longer than 6 s" in swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    (record,) = records_of(sweep)
    assert record.status == "failed"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_data_that_take_longer_than_a_job_may(shell: Shell) -> None:
    """Or wait for others to prepare: both are done, and have trained within their limit."""
    limit_s = 15
    swept = shell.sweep(
        "hydra/launcher=sparsepipe",
        "hydra.launcher.cores_per_rank=1",
        f"hydra.launcher.job_limit_s={limit_s}",
        "hardware.accelerator=cpu",
        "trainer.max_epochs=1",
        f"data.prepare_s={2 * limit_s}",
        "seed=0,1",
        timeout_s=280,
    )
    assert swept.code == 0, swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    records = records_of(sweep)
    assert [record.status for record in records] == ["finished", "finished"]
    assert records[0].seconds > limit_s
