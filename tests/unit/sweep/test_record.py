"""Jobs that cannot tell what has come of them: the disk of the sweep's directory is full, maybe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.sweep import process, record, running_job
from sparsepipe.sweep.callbacks import exit_code, failures
from sparsepipe.sweep.display import Lines
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.progress import write_started
from sparsepipe.sweep.record import JobRecord, SweptJob, read_record, records_of
from sparsepipe.sweep.runner import Runner
from sparsepipe.sweep.running_job import ReadyJob
from sparsepipe.sweep.slots import Demand, Machine, Settings, Slots
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import composed
from tests.support.sweep_cases import tiny_spec

MARK = "0" * 32
PLAN = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")


@pytest.fixture(autouse=True)
def nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_unwritten", {})


def swept(place: Path, *configs: RunSpec) -> list[JobRecord]:
    """What has come of jobs with these configurations."""
    demand = Demand(ranks=1, cores=1, gpus=())
    jobs = [
        ReadyJob(
            job=SweptJob(number=number, overrides=(f"seed={number}",), sweep=place),
            spec=config,
            demand=demand,
        )
        for number, config in enumerate(configs)
    ]
    runner = Runner(
        Slots(machine=Machine(cores=(0,), gpus=())),
        settings=Settings(),
        texts={number: f"seed={number}" for number in range(len(jobs))},
        view=Lines(),
        on_start=lambda job: None,
        on_end=lambda record: None,
    )
    found = runner.run(jobs, same={}, known=[])
    assert records_of(place) == [found[number] for number in range(len(jobs))]
    return [found[number] for number in range(len(jobs))]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobRecord]:
    """What has come of a job whose process ends without a word."""

    def ended(code: int = 0, *, tells: Path | None = None, mark: str = MARK) -> JobRecord:
        def start(job: SweptJob, config: Any, **more: Any) -> JobProcess:
            if tells is not None:
                write_started(job, tells, mark=mark)
            words = [sys.executable, "-S", "-c", f"raise SystemExit({code})"]
            return JobProcess(subprocess.Popen(words, start_new_session=True), MARK)

        monkeypatch.setattr(running_job.JobProcess, "start", start)
        (found,) = swept(tmp_path / "sweep", tiny_spec(objective="test/accuracy"))
        return found

    return ended


def run(place: Path, *, time_s: float = 1e12, **result: object) -> Path:
    write_json(place / "result.json", result)
    write_json(place / "DONE.json", {"time": time_s})
    return place


def test_a_finished_job_that_could_not_write_its_record(
    tmp_path: Path, ended: Callable[..., JobRecord]
) -> None:
    done = run(tmp_path / "run", **{"test/accuracy": 0.75})
    found = ended(tells=done)
    assert (found.status, found.error, found.exit_code) == ("finished", None, 0)
    assert (found.run, found.value, found.before) == (str(done), 0.75, False)
    assert (found.number, found.overrides, found.mark) == (0, ("seed=0",), MARK)
    assert found.log == str(tmp_path / "sweep" / "jobs" / "0" / "log.txt")


def test_or_that_it_had_been_finished_before(
    tmp_path: Path, ended: Callable[..., JobRecord]
) -> None:
    found = ended(tells=run(tmp_path / "run", time_s=1.0, **{"test/accuracy": 0.75}))
    assert (found.status, found.before) == ("finished", True)


def test_no_run_is_taken_for_finished_that_may_not_be(
    tmp_path: Path, ended: Callable[..., JobRecord]
) -> None:
    """One without an end, another process's, or one of a job that ended badly."""
    done = run(tmp_path / "run", **{"test/accuracy": 0.75})
    (tmp_path / "begun").mkdir()
    for found in (
        ended(),
        ended(tells=tmp_path / "begun"),
        ended(tells=done, mark="of another sweep"),
    ):
        assert (found.status, found.run, found.exit_code) == ("failed", None, 1)
        assert "exit code 0 and left no record" in (found.error or "")
    found = ended(3, tells=done)
    assert (found.status, found.run, found.exit_code) == ("failed", None, 3)
    assert "exit code 3 and left no record" in (found.error or "")


def test_a_run_without_the_value_that_a_search_needs(
    tmp_path: Path, ended: Callable[..., JobRecord]
) -> None:
    found = ended(tells=run(tmp_path / "run", loss=0.5))
    assert (found.status, found.run, found.exit_code) == ("failed", None, 2)
    assert "objective=test/accuracy is no figure" in (found.error or "")


def test_a_job_that_can_write_no_files_runs_all_the_same(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="sparsepipe")
    job = SweptJob(number=0, overrides=(), sweep=workplace / "sweep")
    job.path.parent.mkdir(parents=True)
    job.path.touch()  # a file in the place of a directory
    found = run_swept(job, lambda: composed("experiment=tiny", *PLAN), fresh_processes=False)
    assert (Path(found.run or "") / "DONE.json").exists()
    assert "cannot follow this job" in caplog.text
    assert "cannot be written for now" in caplog.text


@pytest.mark.full
@pytest.mark.timeout(600)
def test_records_that_cannot_be_written(
    workplace: Path, networks_for_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that is done, and of one that fails: both are known, and written once they can be.

    What is to be a file is a directory, from the moment at which the job's process is started.
    """
    sweep = workplace / "sweep"
    in_the_way = [sweep / "jobs" / str(number) / "record.json" / "file" for number in range(2)]

    class Process(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, words: list[str], **more: Any) -> None:
            for file in in_the_way:
                if str(file.parents[1]) in words[-1]:
                    file.parent.mkdir()
                    file.touch()
            super().__init__(words, **more)

    monkeypatch.setattr(process.subprocess, "Popen", Process)
    done, failed = swept(
        sweep,
        composed("experiment=tiny", *PLAN, "objective=bottleneck_s"),
        composed("experiment=tiny", "task=evaluate", "checkpoint=nowhere"),
    )
    assert all(file.exists() for file in in_the_way), "neither has left a record"
    assert (done.status, done.error, done.exit_code) == ("finished", None, 0)
    assert done.value == read_json(Path(done.run or "") / "result.json")["bottleneck_s"]
    assert "exit code 5 and left no record" in (failed.error or "")
    assert exit_code([done, failed]) == 5
    told = "\n".join(failures([done, failed], ["done", "failed"], total=2))
    assert "1 of 2 jobs failed" in told
    assert "  | error: " in told.replace("[sparsepipe] ", ""), "its log tells why"
    assert "nowhere" in told
    for file in in_the_way:
        file.unlink()
        file.parent.rmdir()
    assert records_of(sweep) == [done, failed]
    assert [read_record(file.parent) for file in in_the_way] == [done, failed]
