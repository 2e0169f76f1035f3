"""The beginning and the end of a sweep: its directory, failures, table, ledger and exit code."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from pandas.testing import assert_frame_equal

from sparsepipe.config.sweep_environment import command_of
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep import callbacks
from sparsepipe.sweep.callbacks import SweepEnd, SweepLedger, SweepSearch, SweepTable, claim
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.record import JobRecord, SweptJob, read_record, records_of, refusal
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import Shell, composed, fault, orphans, wait_for
from tests.support.sweep_cases import leave_record

STOPPED = {"status": "stopped", "error": "ended with the sweep", "exit_code": 130}


def left(sweep: Path) -> list[JobRecord]:
    """A job that failed, one that finished, one that was stopped; what none can read."""
    leave_record(sweep, 0, "++seed=0", run=None)
    leave_record(sweep, 1, "++seed=1", run=sweep / "run")
    leave_record(sweep, 2, "++seed=2", run=None, **STOPPED)
    for number, text in ((3, "{"), (4, "[]"), (5, '{"number": 5}')):
        (sweep / "jobs" / str(number)).mkdir()
        (sweep / "jobs" / str(number) / "record.json").write_text(text)
    return records_of(sweep)


def config_of(sweep: Path) -> DictConfig:
    return OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})


class Broken(Callback):
    """Somebody's own."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        raise KeyError("somebody's own mistake")


BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
SEARCHES = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


def begun(sweep: Path, *, sweeper: str = SEARCHES) -> DictConfig:
    """The configuration of a sweep that has begun."""
    targets = {"end": SweepEnd, "broken": Broken}
    config = config_of(sweep)
    config.hydra.overrides = {"task": ["seed=0,1,2"]}
    config.hydra.sweeper = {"_target_": sweeper}
    config.hydra.callbacks = {
        name: {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        for name, kind in targets.items()
    }
    SweepEnd().on_multirun_start(config)
    return config


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    monkeypatch.setattr(callbacks, "_exit_codes", [])
    monkeypatch.setattr(callbacks, "_running", [])
    for name in ("DIR", "COMMAND", "BEGAN", "THREADS"):
        monkeypatch.setenv(f"SPARSEPIPE_SWEEP_{name}", "")  # which a sweep sets, and is set back
    caplog.set_level(logging.INFO)
    return caplog


def test_unreadable_records_are_left_out_with_a_warning(tmp_path: Path, said) -> None:
    assert [record.number for record in left(tmp_path)] == [0, 1, 2]
    warned = [record.getMessage() for record in said.records]
    assert len(warned) == 3
    for number in (3, 4, 5):
        assert any(f"jobs/{number}/record.json" in text and "remedy" in text for text in warned)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("overrides", "seed=0"), ("overrides", [1]), ("status", "done"), ("number", "0")),
        *(("run", 7), ("exit_code", None), ("value", True), ("began_s", "noon")),
        ("colour", "red"),
    ],
)
def test_records_of_other_values_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    record = leave_record(tmp_path, 0, "seed=0", run=None)
    path = tmp_path / "jobs" / "0" / "record.json"
    assert read_record(path) == record
    write_json(path, {**read_json(path), key: value})
    with pytest.raises(
        DataError, match=rf"record\.json does not hold the record of a job: .*{key}"
    ):
        read_record(path)


def test_the_message_about_failed_and_stopped_jobs(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("one\n\ntwo\n")
    leave_record(tmp_path, 0, "++seed=0", run=None, log=str(log))
    leave_record(tmp_path, 1, "++seed=1", run=tmp_path / "run")
    leave_record(tmp_path, 2, "++seed=2", run=None, log=str(log), **STOPPED)
    records = records_of(tmp_path)
    said = list(callbacks.failures(records, ["a", "b", "c"], total=3))
    assert said == [
        "1 of 3 jobs failed, 1 stopped:",
        "\njob 1 (a): it broke\n  remedy: mend it",
        f"  the end of {log}:",
        "  | one",
        "  | two",
        "\njob 3 (c): ended with the sweep",
    ]
    refusal(SweptJob(number=3, overrides=("++seed=3",), sweep=tmp_path), None)
    head, *rest = callbacks.failures(records_of(tmp_path), ["a", "b", "c", "d"], total=6)
    assert head == "1 of 6 jobs failed, 1 stopped, 3 not started:"
    assert rest == said[1:]


@pytest.mark.parametrize(
    ("sweeper", "words", "total"),
    [
        ({}, ["seed=0,1,2,3"], 2),
        ({"n_trials": 12}, ["a=interval(0,1)"], 12),
        ({"n_trials": 1}, ["a=interval(0,1)"], 2),
        ({"n_trials": 12, "sampler": {"_target_": "optuna.samplers.GridSampler"}}, ["d=5"], 2),
    ],
)  # fmt: skip
def test_how_many_jobs_a_sweep_is_to_have(
    sweeper: dict[str, Any], words: list[str], total: int
) -> None:
    config = OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": {"task": words}}})
    assert callbacks.expected_jobs(config, begun=2) == total


def test_the_table_names_the_best_by_the_objective_and_the_search_its_run(
    tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sweeper's direction; figures of the test count for nothing."""
    for number, (lr, loss) in enumerate(((0.1, 0.5), (0.2, 0.25), (0.3, 0.25))):
        run = tmp_path / "runs" / str(number)
        figures = {"val/loss": loss, "val/accuracy": 0.5, "test/accuracy": loss}
        figures["started_at"] = f"2026-11-27T23:21:5{9 - number}+00:00"
        write_json(run / "result.json", figures)
        words = (f"++a.lr={lr}", "name=x", f"++data.root=/my\\ parts/{number}")
        leave_record(tmp_path, number, *words, run=run, value=loss)
    config = config_of(tmp_path)
    config.objective = "val/loss"
    config.hydra.sweeper = {"n_trials": 4, "direction": "minimize"}
    config.hydra.overrides = {"task": ["++a.lr=interval(0,1)", "name=x"]}
    found = {"name": "optuna", "best_params": {"++a.lr": 0.2}, "best_value": 0.25}
    (tmp_path / "optimization_results.yaml").write_text(yaml.safe_dump(found))
    monkeypatch.setenv("COLUMNS", "60")
    SweepSearch().on_multirun_end(config)
    SweepTable().on_multirun_end(config)
    assert yaml.safe_load((tmp_path / "optimization_results.yaml").read_text()) == {
        **found, "best_params": {"a.lr": 0.3}, "best_run": str(tmp_path / "runs" / "2")
    }  # fmt: skip
    message = said.messages[-1]
    assert message.startswith("4 jobs, 1 not started (")
    assert "table.md, which has more columns)" in message
    assert max(len(line) for line in message.splitlines() if line.startswith("|")) <= 60
    line = "best, by the smallest val/loss (0.25): a.lr=0.3 data.root=/my\\ parts/2, run "
    line += str(tmp_path / "runs" / "2")
    assert line in message
    text = (tmp_path / "table.md").read_text()
    assert line in text
    assert "| /my parts/2 |" in text
    assert "test accuracy" in text
    config.hydra.sweeper.direction = "maximize"
    SweepTable().on_multirun_end(config)
    (tmp_path / "optimization_results.yaml").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"results\.yaml is not a valid result of a search"):
        SweepSearch().on_multirun_end(config)  # of which Hydra warns
    assert f"parts/0, run {tmp_path / 'runs' / '0'}" in said.messages[-1]


@pytest.mark.parametrize(
    ("objective", "direction", "doubt"),
    [
        (
            "val/accuracy",
            "minimize",
            "the smallest val/accuracy; set hydra.sweeper.direction=maximize",
        ),
        ("val/loss", "maximize", "the largest val/loss; set hydra.sweeper.direction=minimize"),
        ("val/loss", "minimize", None),
        ("val/accuracy", None, None),
        (None, "minimize", None),
    ],
)
def test_a_search_for_the_worst_is_doubted(
    tmp_path: Path, said, objective: str | None, direction: str | None, doubt: str | None
) -> None:
    config = config_of(tmp_path)
    config.objective = objective
    config.hydra.overrides = {"task": []}
    config.hydra.sweeper = {"_target_": SEARCHES, "direction": direction}
    SweepEnd().on_multirun_start(config)
    warned = [each.getMessage() for each in said.records if each.levelname == "WARNING"]
    assert len(warned) == (doubt is not None)
    assert all(doubt in text for text in warned)


def test_the_exit_code_is_that_of_the_first_job_that_failed(
    tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callbacks.exit_code_of_sweep() == 0
    records = left(tmp_path)
    callbacks.note_exit_code(records[1:2])
    assert callbacks.exit_code_of_sweep() == 0
    callbacks.note_exit_code(records[2:])
    assert callbacks.exit_code_of_sweep() == 130
    callbacks.note_exit_code(records)
    assert callbacks.exit_code_of_sweep() == 130, "what came first"
    monkeypatch.setattr(callbacks, "_exit_codes", [])  # as where another launcher has run the jobs
    callbacks.SweepEnd().on_multirun_end(config_of(tmp_path))
    assert callbacks.exit_code_of_sweep() == 1
    assert "1 of 3 jobs failed, 1 stopped:" in said.records[-1].getMessage()


def raised(text: str) -> Exception:
    """An error that has come from somewhere."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_what_breaks_a_sweep_that_searches_nothing_is_no_matter_of_values(
    tmp_path: Path, said
) -> None:
    """Its table and its ledger are made; the error comes as it is."""
    begun(tmp_path, sweeper=BASIC)
    left(tmp_path)
    assert not callbacks.end_early(raised("no space left"))
    texts = [record.getMessage() for record in said.records]
    assert any(text.startswith("1 of 3 jobs failed, 1 stopped:") for text in texts)
    assert not any("values" in text for text in texts)


def test_a_sweep_whose_sweeper_gives_up_is_reported_as_others_are(tmp_path: Path, said) -> None:
    begun(tmp_path)
    left(tmp_path)
    assert callbacks.end_early(raised("no number"))
    assert callbacks.exit_code_of_sweep() == 1
    *before, failed, trace, end = (record.getMessage() for record in said.records)
    (broken,) = (text for text in before if "Broken: " in text)
    assert "somebody's own mistake" in broken, "and the others are told"
    assert failed.startswith("1 of 3 jobs failed, 1 stopped:")
    assert trace.startswith("Traceback")
    assert "in raised" in trace, "whoever is to blame"
    assert "(ValueError: no number)" in end
    assert "remedy: correct the jobs" in end


def test_errors_without_failed_jobs_do_not_end_a_sweep(tmp_path: Path, said) -> None:
    assert not callbacks.end_early(ValueError("no sweep at all"))
    config = begun(tmp_path)
    leave_record(tmp_path, 0, "++seed=0", run=tmp_path / "run")
    assert not callbacks.end_early(ValueError("somebody's own"))
    left(tmp_path)
    SweepEnd().on_multirun_end(config)
    said.clear()
    assert not callbacks.end_early(ValueError("after its end"))
    assert not said.records


def test_the_table_distinguishes_stopped_from_failed_jobs(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "result.json", {"train_shapes_per_s": 2.0})
    leave_record(tmp_path, 0, "++seed=0", run=None)
    SweepTable().on_multirun_end(config_of(tmp_path))
    assert not (tmp_path / "table.csv").exists(), "of no finished job"
    left(tmp_path)
    SweepTable().on_multirun_end(config_of(tmp_path))
    rows = [row.split(",") for row in (tmp_path / "table.csv").read_text().splitlines()]
    status, rate = (rows[0].index(name) for name in ("status", "train_shapes_per_s"))
    assert [row[status] for row in rows[1:]] == ["failed", "finished", "stopped"]
    assert [row[rate] for row in rows[1:]] == ["", "2.0", ""]
    text = (tmp_path / "table.md").read_text()
    assert "| failed" in text
    assert "| stopped" in text


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_stopped_sweep_reports_failures_and_writes_its_ledger(shell: Shell) -> None:
    stuck = "{stuck: {_target_: tests.support.tinyhouse.LongStep, step: 1}}"
    jobs = ("{}", fault([(1, 0)]).removeprefix("callbacks="), stuck)
    sweep = shell.start(
        "hydra/launcher=sparsepipe", "hydra.launcher.max_jobs=1", "trainer.max_epochs=1",
        "parallel.grace_s=1", f"callbacks={','.join(jobs)}", "hydra.mode=MULTIRUN",
    )  # fmt: skip
    wait_for((shell.cwd / "in-step-0").exists)
    sweep.terminate()
    stopped = shell.wait(sweep, timeout_s=240)
    assert stopped.code == 143, stopped.err
    assert not orphans(shell.cwd)
    told = stopped.err.partition("1 of 3 jobs failed, 1 stopped:")[2]
    assert "somebody's own mistake" in told
    assert "run the same command again to go on" in told
    ledger = load_results(shell.cwd / "outputs" / "tiny" / "ledger.csv")
    assert list(ledger["epochs"]) == [1], "of the job that was done"


def test_a_sweep_that_is_started_again_has_the_same_name() -> None:
    first = command_of(["experiment=table2", "++data.resolution=32,50"])
    assert first == command_of(["++data.resolution=32,50", "experiment=table2"])
    elsewhere = ["force=true", "logger=wandb", "++logger.wandb.offline=false", "++paths.outputs=b"]
    assert first == command_of(["experiment=table2", "data.resolution=32,50", *elsewhere])
    assert first != command_of(["experiment=table2", "++data.resolution=32"])
    assert first != command_of(["experiment=table2"])


CLAIMS = """
import pathlib, sys, time
from sparsepipe.sweep.callbacks import claim
claim(pathlib.Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    callbacks._lock.close()


def test_the_records_of_an_earlier_sweep_do_not_count(tmp_path: Path) -> None:
    claim(tmp_path)
    leave_record(tmp_path, 0, "seed=1", run=None)
    for name in ("table.md", "optimization_results.yaml", "jobs/mine.sh", "mine.txt"):
        (tmp_path / name).touch()
    claim(tmp_path)
    assert records_of(tmp_path) == []
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {callbacks._LOCK, "mine.sh", "mine.txt"}, "files of others stay"


@pytest.mark.parametrize("name", ["jobs/submit.sh", "report/paper.tex", "table.csv", "table.md"])
def test_files_that_no_sweep_has_written_are_not_touched(tmp_path: Path, name: str) -> None:
    """Many a project has jobs and reports of its own, in whose directory no sweep may be."""
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is in the way") as refused:
        claim(tmp_path)
    assert f"{tmp_path / name.partition('/')[0]} is in the way" in str(refused.value)
    assert f"hydra.sweep.dir={tmp_path / 'sweep'}" in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    claim(tmp_path / "sweep")


def test_two_sweeps_in_one_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one is refused, before it has touched anything, for as long as the first runs."""
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    with first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "\n"
            kept = leave_record(tmp_path, 0, "seed=0", run=None)
            with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
                patch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
                with pytest.raises(SystemExit) as refused:
                    SweepEnd().on_multirun_start(config)
        finally:
            first.send_signal(signal.SIGKILL)
    assert refused.value.code == 2
    assert f"another sweep runs in {tmp_path}" in caplog.text
    assert "remedy: wait until it ends, or end it" in caplog.text
    assert records_of(tmp_path) == [kept]
    claim(tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> DictConfig:
    return OmegaConf.create(
        {
            "name": "swept",
            "paths": {"outputs": str(tmp_path / "outputs")},
            "hydra": {"sweep": {"dir": str(tmp_path / "outputs" / "swept" / "sweeps" / "now")}},
        }
    )


@pytest.fixture
def finished(tmp_path: Path) -> Callable[..., Path]:
    def finished(name: str, run_id: str) -> Path:
        run = tmp_path / "outputs" / name / run_id
        write_json(run / "result.json", {"name": name, "run_id": run_id, "kind": "measured"})
        write_json(run / "DONE.json", {"time": 0.0})
        return run

    return finished


def test_all_finished_runs_of_the_experiment_count(
    config: DictConfig, finished: Callable[..., Path], tmp_path: Path
) -> None:
    """Also those of no job of this sweep; of its jobs, whatever process has run them."""
    finished("swept", "earlier")
    elsewhere = finished("other name", "2")
    finished("bystander", "3")
    for number, run in enumerate((finished("swept", "1"), elsewhere, None)):
        leave_record(Path(config.hydra.sweep.dir), number, run=run)
    SweepLedger().on_multirun_end(config)
    outputs = tmp_path / "outputs"
    assert list(load_results(outputs / "swept" / "ledger.csv")["run_id"]) == ["1", "earlier"]
    assert list(load_results(outputs / "other name" / "ledger.csv")["run_id"]) == ["2"]
    assert not (outputs / "bystander" / "ledger.csv").exists()


def test_without_a_finished_run_there_is_no_ledger_and_no_word_of_it(
    config: DictConfig,
    finished: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reports, which tell of figures of others, are no rows."""
    (tmp_path / "outputs" / "swept" / "0").mkdir(parents=True)
    leave_record(Path(config.hydra.sweep.dir), 0, run=None)
    SweepLedger().on_multirun_end(config)
    left = {path.name for path in (tmp_path / "outputs" / "swept").iterdir()}
    assert left == {"0", "sweeps"}
    told = {"name": "swept", "run_id": "1", "kind": "measured", "task_name": "report"}
    write_json(finished("swept", "1") / "result.json", told)
    SweepLedger().on_multirun_end(config)
    assert not caplog.messages
    assert not (tmp_path / "outputs" / "swept" / "ledger.csv").exists()
    finished("swept", "2")
    SweepLedger().on_multirun_end(config)
    for where in ("swept", "swept/ledger.csv", "swept/ledger.parquet"):
        assert list(load_results(tmp_path / "outputs" / where)["run_id"]) == ["2"]


def test_what_keeps_a_ledger_from_being_written_ends_no_sweep(
    config: DictConfig,
    finished: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    finished("swept", "1")
    (tmp_path / "outputs" / "swept" / "ledger.parquet").mkdir()
    with caplog.at_level(logging.WARNING):
        SweepLedger().on_multirun_end(config)
    (message,) = caplog.messages
    assert "no ledger of" in message
    assert "remedy:" in message


@pytest.mark.full
def test_two_sweeps_one_after_the_other_in_one_directory(shell: Shell) -> None:
    """A job that fails has no row; the next sweep adds its runs, and no run has two rows."""
    place = shell.cwd / "place"
    plans = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
    plans = (*plans, "hydra/launcher=sparsepipe", f"hydra.sweep.dir={place}")
    swept = shell.sweep(*plans, "seed=-1,0")
    assert swept.code == 2
    (run,) = [Path(line) for line in swept.out.splitlines()]
    experiment = shell.cwd / "outputs" / "tiny"
    assert "ledger of 1 finished run: outputs/tiny/ledger.csv" in swept.err
    first = load_results(experiment / "ledger.parquet")
    assert list(first["run_id"]) == [run.name]
    result = read_json(run / "result.json")
    assert first["bottleneck_s"][0] == result["bottleneck_s"]
    again = shell.sweep(*plans, "seed=0,1")
    assert again.code == 0, again.err
    assert "failed" not in again.err
    assert [record.before for record in records_of(place)] == [True, False]
    assert len((place / "table.csv").read_text().splitlines()) == 3
    second = load_results(experiment / "ledger.csv")
    assert set(second["run_id"]) == {Path(line).name for line in again.out.splitlines()}
    assert list(second["seed"]) == [
        read_json(experiment / run_id / "result.json")["seed"] for run_id in second["run_id"]
    ]
    same = second[second["run_id"] == run.name].reset_index(drop=True)
    assert_frame_equal(same, first)


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


def test_a_point_that_is_sampled_twice_is_trained_anew_once(
    workplace: Path, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Optuna asks, which leaves no ``multirun.yaml``."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert sweep(workplace / "first", 2).attempt == 0
    assert sweep(workplace / "second", 3, "force=true").attempt == 1
    assert sweep(workplace / "third", 2, "force=true").attempt == 2, "by each sweep"
