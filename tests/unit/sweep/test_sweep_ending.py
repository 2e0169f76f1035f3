"""The end of a sweep: what is told of its jobs, and the exit code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config.sweep_environment import command_of
from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep import callbacks
from sparsepipe.sweep.callbacks import SweepEnd, SweepTable
from sparsepipe.sweep.record import JobRecord, records_of
from tests.support.command_line import Shell, fault, wait_for
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


def test_what_cannot_be_read_is_told_and_left_out(tmp_path: Path, said) -> None:
    assert [record.number for record in left(tmp_path)] == [0, 1, 2]
    warned = [record.getMessage() for record in said.records]
    assert len(warned) == 3
    for number in (3, 4, 5):
        assert any(f"jobs/{number}/record.json" in text and "remedy" in text for text in warned)


def test_what_is_told_of_jobs_that_failed_and_were_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("one\n\ntwo\n")
    leave_record(tmp_path, 0, "++seed=0", run=None, log=str(log))
    leave_record(tmp_path, 1, "++seed=1", run=tmp_path / "run")
    leave_record(tmp_path, 2, "++seed=2", run=None, log=str(log), **STOPPED)
    assert list(callbacks.failures(records_of(tmp_path))) == [
        "1 of 3 jobs failed, 1 stopped:",
        "\njob 1 (seed=0): it broke\n  remedy: mend it",
        f"  the end of {log}:",
        "  | one",
        "  | two",
        "\njob 3 (seed=2): ended with the sweep",
    ]


def test_the_exit_code_is_that_of_the_first_job_that_failed(tmp_path: Path, said) -> None:
    assert callbacks.exit_code_of_sweep() == 0
    records = left(tmp_path)
    callbacks.note_exit_code(records[1:2])
    assert callbacks.exit_code_of_sweep() == 0
    callbacks.note_exit_code(records[2:])
    assert callbacks.exit_code_of_sweep() == 130
    callbacks.note_exit_code(records)
    assert callbacks.exit_code_of_sweep() == 130, "what came first"


def test_jobs_of_other_launchers_give_the_command_its_exit_code(tmp_path: Path, said) -> None:
    left(tmp_path)
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


def test_a_sweep_whose_sweeper_gives_up_is_told_as_others_are(tmp_path: Path, said) -> None:
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
    assert "remedy: mend the jobs" in end


def test_what_no_job_has_to_do_with_is_not_told_as_theirs(tmp_path: Path, said) -> None:
    assert not callbacks.end_early(ValueError("no sweep at all"))
    config = begun(tmp_path)
    leave_record(tmp_path, 0, "++seed=0", run=tmp_path / "run")
    assert not callbacks.end_early(ValueError("somebody's own"))
    left(tmp_path)
    SweepEnd().on_multirun_end(config)
    said.clear()
    assert not callbacks.end_early(ValueError("after its end"))
    assert not said.records


def test_the_table_tells_jobs_that_were_stopped_from_those_that_failed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    left(tmp_path)
    SweepTable().on_multirun_end(config_of(tmp_path))
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["status", "failed", "finished", "stopped"]
    text = (tmp_path / "table.md").read_text()
    assert "| failed" in text
    assert "| stopped" in text


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_sweep_that_is_stopped_tells_what_has_failed_and_leaves_its_ledger(shell: Shell) -> None:
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
