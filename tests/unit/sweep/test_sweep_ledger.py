"""The ledger that a sweep leaves beside its runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from pandas.testing import assert_frame_equal

from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep.callbacks import SweepLedger
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import Shell
from tests.support.sweep_cases import leave_record


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
    config: DictConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outputs" / "swept" / "1").mkdir(parents=True)
    leave_record(Path(config.hydra.sweep.dir), 0, run=None)
    SweepLedger().on_multirun_end(config)
    assert not caplog.messages
    left = {path.name for path in (tmp_path / "outputs" / "swept").iterdir()}
    assert left == {"1", "sweeps"}


def test_reports_are_no_rows(
    config: DictConfig,
    finished: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They tell of figures of others; where there is nothing else, there is no ledger."""
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
def test_a_sweep_leaves_a_ledger_of_what_is_finished(shell: Shell) -> None:
    """A job that fails has no row; the next sweep adds its runs, and no run has two rows."""
    plans = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
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
    second = load_results(experiment / "ledger.csv")
    assert set(second["run_id"]) == {Path(line).name for line in again.out.splitlines()}
    assert list(second["seed"]) == [
        read_json(experiment / run_id / "result.json")["seed"] for run_id in second["run_id"]
    ]
    same = second[second["run_id"] == run.name].reset_index(drop=True)
    assert_frame_equal(same, first)
