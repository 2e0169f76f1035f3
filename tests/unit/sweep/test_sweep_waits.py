"""What a job of a sweep waits for, for how long at most, and that this is not its own time."""

from __future__ import annotations

import math
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

from sparsepipe.aside import Aside
from sparsepipe.errors import ConfigError
from sparsepipe.results.files import write_json
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep import running as running_module
from sparsepipe.sweep.one_job import run_swept
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import SweptJob, read_record
from sparsepipe.sweep.running import ReadyJob, RunningJob
from sparsepipe.sweep.settings import Settings
from sparsepipe.sweep.slots import Demand, Grant
from sparsepipe.sweep.stages import Doing, Telling, doing
from tests.support.command_line import composed, wait_for

CONFIG = {"hardware": {}, "parallel": {"grace_s": 0.0}, "force": False}
TINY = ("experiment=tiny", "trainer.max_epochs=1", "task.test=false")
PREPARES = Aside(what="prepares", limit_s=60)
WAITS = Aside(what="waits")


@pytest.mark.parametrize(
    ("stage", "limit_s", "expected"),
    [
        ("works", math.inf, 7),
        ("prepares", 60, 57),
        ("prepares", 20, 27),
        ("waits", math.inf, 57),
    ],
)
def test_what_of_a_jobs_time_is_not_its_own(stage: str, limit_s: float, expected: float) -> None:
    """It has been at something else for 7 s before, and is at this for 50 s."""
    now = Doing(since_s=1000, stage=stage, limit_s=limit_s, aside_s=7)
    assert now.aside_at(1050) == expected
    assert now.aside_at(900) == 7, "the clock was set"


@pytest.fixture
def job(tmp_path: Path) -> SweptJob:
    return SweptJob(number=0, overrides=("seed=0",), sweep=tmp_path / "sweep")


def test_what_a_job_tells_is_what_its_sweep_hears(job: SweptJob) -> None:
    assert doing(job) is None
    telling = Telling(job.started)
    telling.hear(PREPARES)
    first = doing(job)
    assert first is not None
    assert (first.stage, first.limit_s, first.run) == ("prepares", 60, None)
    telling.note_run(Path("there"))
    telling.hear(WAITS)
    second = doing(job)
    assert second is not None
    assert (second.stage, second.limit_s, second.run) == ("waits", math.inf, "there")
    assert second.aside_s == first.aside_at(second.since_s)
    telling.hear(None)
    third = doing(job)
    assert third is not None
    assert third.works
    assert third.aside_s == second.aside_at(third.since_s) >= second.aside_s


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a second."""
    monkeypatch.setattr(running_module, "_LOOK_AGAIN_S", 0.0)


@contextmanager
def running(job: SweptJob, **limits: float | None) -> Iterator[RunningJob]:
    """A job whose process sleeps."""
    job.path.mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
    )
    try:
        yield RunningJob(
            ready=ReadyJob(job=job, config=CONFIG, demand=Demand(ranks=1, cores=1)),
            grant=Grant(cores=(0,), gpus=(), threads=1),
            process=JobProcess(first, "m" * 32),
            settings=Settings(**limits),
        )
    finally:
        first.kill()
        first.wait(20)


def look(job: RunningJob, *, for_strangers: bool = True) -> bool:
    """As a sweep does all the time; whether the job is gone."""
    job.note_stage()
    job.note_wait(for_strangers=for_strangers)
    return job.look_after(signal.SIGTERM)


def look_for(job: RunningJob, seconds: float, *, for_strangers: bool = True) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert not look(job, for_strangers=for_strangers), "it was ended"
        time.sleep(0.01)
    assert job.process.exit_code() is None


def look_until_it_is_gone(job: RunningJob) -> None:
    deadline_s = time.monotonic() + 30
    while not look(job):
        assert time.monotonic() < deadline_s, "it has no limit"
        time.sleep(0.01)


@pytest.mark.parametrize("stage", ["prepares", "waits"])
def test_what_others_do_as_well_is_not_the_jobs_own_time(job: SweptJob, stage: str) -> None:
    with running(job, job_limit_s=50) as one:
        one._began_s -= 100
        write_json(job.started, Doing(since_s=time.time() - 90, stage=stage))
        look_for(one, 0.3)
        write_json(job.started, Doing(since_s=time.time(), aside_s=40))
        look_until_it_is_gone(one)
        assert "ended by hydra.launcher.job_limit_s=50\n" in (one.record().error or "")


def test_a_cache_is_not_built_without_end(job: SweptJob) -> None:
    """From its limit on the clock goes on."""
    with running(job, job_limit_s=50) as one:
        one._began_s -= 200
        write_json(job.started, Doing(since_s=time.time() - 200, stage="prepares", limit_s=100))
        look_until_it_is_gone(one)


def test_a_job_that_tells_nothing_is_at_its_own_work(job: SweptJob) -> None:
    with running(job, job_limit_s=0.1) as one:
        look_until_it_is_gone(one)


def test_another_command_is_not_waited_for_without_end(job: SweptJob) -> None:
    with running(job, wait_limit_s=0.2) as one:
        Telling(job.started).hear(WAITS)
        look_until_it_is_gone(one)
        record = one.record()
    assert (record.status, record.exit_code) == ("failed", 1)
    assert "longer than hydra.launcher.wait_limit_s=0.2\n  remedy: wait" in (record.error or "")


def test_a_job_of_the_same_sweep_is(job: SweptJob) -> None:
    """The limit counts once that one has ended and somebody else is waited for."""
    with running(job, wait_limit_s=0.2) as one:
        Telling(job.started).hear(WAITS)
        look_for(one, 0.5, for_strangers=False)
        look_until_it_is_gone(one)


def test_a_cache_is_waited_for_by_its_own_limit(job: SweptJob) -> None:
    with running(job, wait_limit_s=0.1) as one:
        Telling(job.started).hear(PREPARES)
        look_for(one, 0.5)


@pytest.mark.parametrize(
    ("stage", "run", "works"),
    [("works", "there", True), ("prepares", "there", True), ("works", "elsewhere", False),
     ("works", None, False), ("waits", "there", False)],
)  # fmt: skip
def test_which_job_is_waited_for(stage: str, run: str | None, works: bool, job: SweptJob) -> None:
    with running(job) as one:
        one.now = Doing(since_s=0, stage="waits", run="there")
        other = RunningJob(
            ready=one.ready, grant=one.grant, process=one.process, settings=one.settings
        )
        assert not other.works_for(one), "nobody knows what it is about"
        other.now = Doing(since_s=0, stage=stage, run=run)
        assert other.works_for(one) == works
        assert not one.works_for(one)


def test_that_a_job_waits_is_told_once(job: SweptJob, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sparsepipe")
    with running(job) as one:
        telling, told = Telling(job.started), []
        for now in (PREPARES, WAITS, WAITS, None, WAITS):
            telling.hear(now)
            one.note_stage()
            told.append(caplog.text.count("job 1 waits for another process"))
        assert told == [0, 1, 1, 1, 2]


def test_a_job_is_not_looked_at_all_the_time(
    job: SweptJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "_LOOK_AGAIN_S", 3600.0)
    with running(job) as one:
        telling = Telling(job.started)
        for now in (WAITS, None):
            telling.hear(now)
            one.note_stage()
            assert one.waits


@pytest.fixture
def tiny(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *more: composed(*TINY, *more)


def stage(job: SweptJob) -> str | None:
    now = doing(job)
    return None if now is None else now.stage


@pytest.mark.parametrize(("lock", "expected"), [(True, "prepares"), (False, None)])
def test_a_job_tells_that_it_builds_a_cache(
    lock: bool, expected: str | None, job: SweptJob, tiny: Callable[..., dict[str, Any]]
) -> None:
    """Not where no others wait for what it makes ready: that is its own work, and may hang."""
    config = tiny("data._target_=tests.support.tinycache.CachedData", f"+data.lock={lock}")
    seen: list[Doing | None] = []

    def look_and_let_it_go_on() -> None:
        wait_for(Path("building").exists)
        seen.append(doing(job))
        Path("go on").touch()

    thread = threading.Thread(target=look_and_let_it_go_on)
    thread.start()
    done = run_swept(job, lambda: config, fresh_processes=False)
    thread.join(60)
    assert [now and now.stage for now in seen] == [expected]
    assert [now and now.run for now in seen] == [None]
    told = doing(job)
    assert told is not None
    assert (told.works, told.run) == (True, done.run)
    assert (told.aside_s > 0) == lock


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
    assert stage(job) == "works"


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
