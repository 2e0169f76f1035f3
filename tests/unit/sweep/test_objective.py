"""Figures of runs that sweepers search the best of."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, DivergedError
from sparsepipe.sweep.job import run_swept
from sparsepipe.sweep.record import (
    JobRecord,
    SweptJob,
    objective_value,
    read_record,
    records_of,
    scored,
)
from sparsepipe.utils.files import write_json
from tests.support.command_line import Shell, composed

PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_json(
        tmp_path / "result.json",
        {"test/accuracy": 0.75, "epoch_s": 3, "kind": "measured", "done": True, "none": None},
    )
    return tmp_path


def test_a_run_is_its_directory_and_a_number(run: Path) -> None:
    assert objective_value(run, "epoch_s") == 3.0
    found = scored(str(run), objective_value(run, "test/accuracy"))
    assert found == str(run)
    assert float(found) == 0.75
    # From one process to another.
    sent = pickle.loads(pickle.dumps(found))
    assert (sent, float(sent)) == (str(run), 0.75)

    without = scored(str(run), objective_value(run, None))
    assert (without, hasattr(without, "value")) == (str(run), False)


@pytest.mark.parametrize("objective", ["test/acuracy", "kind", "done", "none", "val/accuracy"])
def test_what_is_no_figure_is_refused(run: Path, objective: str) -> None:
    with pytest.raises(ConfigError, match=f"objective={objective} is not a number") as refused:
        objective_value(run, objective)
    assert ("(nearest: 'test/accuracy')" in str(refused.value)) == (objective == "test/acuracy")
    is_validated = objective == "val/accuracy"
    assert ("train with data.val_share above 0" in refused.value.remedy) == is_validated


def test_a_validation_that_is_not_finite_is_called_so(run: Path) -> None:
    """Nobody is told to validate who did; a blank cell is an epoch without a validation."""
    write_json(run / "result.json", {"val/loss": float("nan"), "val/accuracy": None})
    (run / "metrics.csv").write_text("epoch,step,val/loss,val/accuracy\n0,4,0.5,0.5\n1,8,nan,\n")
    with pytest.raises(DivergedError, match="val/loss is nan in the last epoch"):
        objective_value(run, "val/loss")
    with pytest.raises(ConfigError, match="is not a number"):
        objective_value(run, "val/accuracy")


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobRecord]:
    """Runs a job of a sweep, and reads what it leaves."""
    monkeypatch.chdir(tmp_path)

    def swept(*overrides: str) -> JobRecord:
        job = SweptJob(number=0, overrides=overrides, sweep=tmp_path / "sweep")

        def resolved() -> Mapping[str, Any]:
            return composed("experiment=tiny", *overrides)

        run_swept(job, resolved, fresh_processes=False)
        return read_record(job.record)

    return swept


def test_a_job_leaves_its_value(swept: Callable[..., JobRecord]) -> None:
    record = swept(*PLANS, "objective=bottleneck_s")
    assert (record.status, record.exit_code) == ("finished", 0)
    assert record.run is not None
    assert record.value == objective_value(Path(record.run), "bottleneck_s")
    assert swept(*PLANS).value is None


def test_a_job_without_its_value_has_failed_and_its_run_is_done(
    swept: Callable[..., JobRecord], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="objective=botleneck_s is not a number"):
        swept(*PLANS, "objective=botleneck_s")
    (record,) = records_of(tmp_path / "sweep")
    assert (record.status, record.run, record.value, record.exit_code) == ("failed", None, None, 2)
    assert "(nearest: 'bottleneck_s')" in (record.error or "")
    assert "\n  remedy: set objective to one of its keys" in (record.error or "")
    (done,) = tmp_path.glob("outputs/tiny/*/DONE.json")
    again = swept(*PLANS, "objective=bottleneck_s")
    assert again.before, "the remedy costs nothing"
    assert again.run == str(done.parent)


@pytest.mark.full
def test_other_jobs_of_its_sweep_go_on(shell: Shell) -> None:
    """Where the name is wrong, and where it cannot even be made out."""
    wrong = "objective=botleneck_s,bottleneck_s,${nowhere}"
    done = shell.sweep("hydra/launcher=sparsepipe", *PLANS, wrong)
    assert done.code == 2, done.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    first, second, third = records_of(sweep)
    assert [record.status for record in (first, second, third)] == ["failed", "finished", "failed"]
    assert second.value is not None
    told = done.err.partition("2 of 3 jobs failed:")[2]
    assert "job 1 (" in told
    assert "remedy: set objective to one of its keys that has a number" in told
    assert "nowhere" in (third.error or "")
    assert done.out == f"{second.run}\n"
    assert (sweep / "table.csv").exists()
    assert "Traceback" not in done.err


def test_a_run_is_the_same_whatever_is_searched() -> None:
    base = composed().identity()
    assert composed("objective=epoch_s").identity() == base


def test_it_is_a_name() -> None:
    with pytest.raises(ConfigError, match="'objective' must be text, not 3"):
        composed("objective=3")
