"""The task ``report`` on run directories, as experiments leave them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, DataError
from sparsepipe.launch.job import run_job
from sparsepipe.paper import report_task
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.runs.ledger import gather, load_results
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed
from tests.support.reported_runs import leave_training
from tests.support.wandb_records import recorded

Report = Callable[..., RunDir]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: run_job(composed("task=report", *overrides))


def test_finished_runs_come_into_the_report(report: Report, tmp_path: Path) -> None:
    leave_training(tmp_path / "outputs", "a", test=0.80)
    leave_training(tmp_path / "outputs", "b", test=0.82, seed=1)
    (tmp_path / "outputs/table2/b/DONE.json").unlink()  # it is not finished
    done = report("name=table2")
    assert "80.00" in (done.path / "report.md").read_text()
    assert "<table>" in (done.path / "report.html").read_text()
    assert (done.path / "table2.csv").exists()
    result = read_json(done.result)
    assert result["task_name"] == "report"
    assert result["exhibits"] == ["table2"]
    # Test accuracy and the time of an epoch; there is no training accuracy, and no D-1.
    assert (result["figures"], result["figures_missing"]) == (2, 94)


def test_the_same_runs_are_not_reported_on_twice(report: Report, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    leave_training(outputs, "a")
    first = report("name=table2")
    assert report("name=table2", "model.width=0.5", "seed=3").path == first.path
    leave_training(outputs, "b", seed=1)
    second = report("name=table2")
    assert second.path != first.path
    assert "80.00 to 80.00, 2 runs" in (second.path / "report.md").read_text()


def test_a_report_beside_a_ledger_is_the_same_the_second_time(
    report: Report, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no run that is newer than the ledger, of whose rows it tells."""
    place = tmp_path / "outputs" / "table2"
    leave_training(tmp_path / "elsewhere", "a", test=0.80)
    gather(tmp_path / "elsewhere", to=place)
    first = report("name=table2")
    assert first.path.parent == place
    page = (first.path / "report.md").read_text()
    assert "80.00" in page
    with caplog.at_level(logging.INFO):
        assert report("name=table2").path == first.path
    assert "finished before, nothing to do" in caplog.text
    assert report("name=table2", "force=true").path == first.path
    assert (first.path / "report.md").read_text() == page
    assert list(load_results(tmp_path / "outputs", experiment="table2")["run_id"]) == ["a"]
    leave_training(tmp_path / "outputs", "b", seed=1)
    assert list(load_results(place)["run_id"]) == ["b"], "runs are newer than a ledger beside them"


def test_runs_are_read_once_and_reports_are_not_among_them(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_training(tmp_path / "outputs", "a")
    read, load = [], report_task.load_results

    def counted(*arguments: Any, **more: Any) -> Any:
        frame = load(*arguments, **more)
        read.append(list(frame["run_id"]))
        return frame

    monkeypatch.setattr(report_task, "load_results", counted)
    first = report("name=table2")
    assert read == [["a"]]
    assert report("name=table2").path == first.path
    leave_training(tmp_path / "outputs", "b", seed=1)
    assert report("name=table2").path != first.path
    assert read == [["a"], ["a"], ["a", "b"]]


def test_a_tracker_has_the_table_of_a_report(report: Report, tmp_path: Path) -> None:
    leave_training(tmp_path / "outputs", "a", test=0.80)
    done = report("name=table2", "logger=wandb", "tags=[paper]")
    found = recorded(done.path)
    assert found.run["run_id"] == f"table2-{done.path.name}"
    assert (found.run["job_type"], found.run["tags"]) == ("report", ["paper"])
    assert (found.summary["figures"], found.summary["figures_missing"]) == (2, 94)
    assert set(found.media) == {"figures/table2", "tables/table2"}
    table = read_json(found.media["tables/table2"])
    cells = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(cells) == 96
    (there,) = [
        cell for cell in cells if (cell["quantity"], cell["status"]) == ("test_accuracy", "there")
    ]
    assert (there["grid"], there["network"]) == ("32³", "sparse")
    assert (there["paper"], there["ours"]) == (86.28, 80.0)
    assert sum(cell["status"] == "missing" for cell in cells) == 94


def test_rows_elsewhere_of_another_scale_are_left_out(report: Report, tmp_path: Path) -> None:
    outputs = tmp_path / "recorded"
    where = f"task.where={outputs}"
    leave_training(outputs, "a", test=0.80, scale="desk")
    leave_training(outputs, "b", test=0.60, scale="smoke")
    text = (report("name=table2", where, "task.scale=desk").path / "report.md").read_text()
    assert "80.00" in text
    assert "60.00" not in text
    both = (report("name=table2", where).path / "report.md").read_text()
    assert both.index("### Scale desk") < both.index("### Scale smoke")


def test_without_finished_runs_all_cells_are_missing(report: Report) -> None:
    text = (report("name=table2").path / "report.md").read_text()
    assert "0 of 96 figures are filled in." in text
    assert "sparsepipe -m experiment=table2" in text


def test_runs_that_cannot_be_read_are_not_missing(report: Report, tmp_path: Path) -> None:
    leave_training(tmp_path / "outputs", "a")
    (tmp_path / "outputs/table2/a/result.json").write_text("{")
    with pytest.raises(DataError, match="broken"):
        report("name=table2")
    (tmp_path / "ledger.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="not a valid ledger"):
        report("name=table2", f"task.where={tmp_path / 'ledger.csv'}")


def test_several_of_another_name(report: Report, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    leave_training(outputs, "a", name="mine")
    leave_training(
        outputs, "b", name="mine", task_name="train_if_fits", test=0.7, **{"study.exhibit": "fig8"}
    )
    leave_training(outputs, "c", name="table2", test=0.6)
    done = report("name=mine", "task.exhibits=[table2,fig8]")
    told = (done.path / "report.md").read_text()
    assert "80.00" in told
    assert "70.00" in told
    assert "60.00" not in told, "of runs that were not asked for"
    assert "sparsepipe -m experiment=fig8 name=mine" in told
    others = report("experiment=fig8", "task.exhibits=[table2,fig9]")
    assert "60.00" in (others.path / "report.md").read_text(), "the name of none of them is given"


def test_what_the_paper_does_not_have_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no report chapter has the name 'mine'") as said:
        report("experiment=table2", "name=mine")
    assert "task.exhibits=[table2]" in said.value.remedy
    assert not list(tmp_path.iterdir())


def test_all_of_the_paper_on_one_page(report: Report, tmp_path: Path) -> None:
    leave_training(tmp_path / "outputs", "a", name="table2")
    leave_training(tmp_path / "outputs", "b", name="fig9")  # of no use there
    done = report("experiment=all")
    text = (done.path / "report.html").read_text()
    places = [text.index(f'<h2 id="{name}">') for name in CHAPTERS]
    assert places == sorted(places)
    assert "80.00" in text
    assert {path.stem for path in done.path.glob("*.csv")} == set(CHAPTERS)


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_experiment_can_be_reported_on(name: str) -> None:
    """Whatever it sets for its own task."""
    config = composed("task=report", f"experiment={name}")
    assert config.task.locate().name == "report"
    assert config.name == name


@pytest.mark.full
def test_the_command_prints_the_directory(tmp_path: Path) -> None:
    """Beside experiments whose hardware is not here."""
    shell = Shell(tmp_path)
    done = shell("task=report", "experiment=fig9")
    assert done.code == 0, done.err
    assert (done.run / "report.html").exists()
    told = json.loads((done.run / "result.json").read_text())
    assert told["figures"] == 0
