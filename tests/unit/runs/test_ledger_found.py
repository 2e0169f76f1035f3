"""Files with a ledger's name that were not asked for, below a directory of runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.runs.ledger import gather, load_results
from sparsepipe.utils.files import write_csv

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ROW = {"run_id": "7", "name": "theirs", "kind": "measured"}


def leave(outputs: Path, name: str, run_id: str, *, done: bool = True) -> None:
    path = outputs / name / run_id
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("{}\n")
    if done:
        told = {"run_id": run_id, "name": name, "kind": "measured"}
        (path / "result.json").write_text(json.dumps(told))
        (path / "DONE.json").write_text(json.dumps({"time": 1.0}))


def leave_others(outputs: Path) -> list[Path]:
    """Somebody's own table, what Git leaves of a large file, and a ledger with a row twice."""
    books, pointer, twice = (outputs / name for name in ("books", "pointer", "twice"))
    for place in (books, pointer, twice):
        place.mkdir(parents=True)
    write_csv(books / "ledger.csv", [{"date": "2026-01-01", "euros": 3}])
    (pointer / "ledger.parquet").write_text(POINTER)
    write_csv(twice / "ledger.csv", [ROW] * 2)
    return [books / "ledger.csv", pointer / "ledger.parquet", twice / "ledger.csv"]


def test_files_that_are_no_ledgers_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(tmp_path / "runs", "b", "2")
    gather(tmp_path / "runs", to=tmp_path / "outputs" / "recorded")
    leave(tmp_path / "outputs", "a", "1")
    others = leave_others(tmp_path / "outputs")
    for experiment, found in (("a", ["1"]), ("b", ["2"]), (None, ["1", "2"])):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            frame = load_results(tmp_path / "outputs", experiment=experiment)
        assert list(frame["run_id"]) == found
        assert len(caplog.messages) == len(others) == 3
        for file, message in zip(others, caplog.messages, strict=True):
            assert message.startswith(str(file))
            assert "the ledger is left out. remedy: write it anew" in message


def test_where_nothing_else_is_there_no_run_is_finished(tmp_path: Path) -> None:
    leave_others(tmp_path / "outputs")
    with pytest.raises(NoRunsError, match="outputs has no finished run"):
        load_results(tmp_path / "outputs", experiment="a")


@pytest.mark.parametrize("name", ["books", "pointer", "twice"])
def test_a_given_file_that_is_no_ledger_is_refused(tmp_path: Path, name: str) -> None:
    """By its directory or by the name of an experiment, as by its own."""
    outputs = tmp_path / "outputs"
    leave(outputs, "a", "1")
    (file,) = [path for path in leave_others(outputs) if path.parent.name == name]
    for where, experiment in ((file, None), (outputs / name, None), (outputs, name)):
        with pytest.raises(DataError, match=r"is not a valid ledger|more than once") as error:
            load_results(where, experiment=experiment)
        assert error.value.message.startswith(str(file))


def test_unfinished_runs_are_named_rather_than_other_experiments(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    leave(tmp_path / "runs", "b", "2")
    gather(tmp_path / "runs", to=outputs / "recorded")
    for run_id in ("1", "3"):
        leave(outputs, "a", run_id, done=False)
    with pytest.raises(NoRunsError, match="a has no finished run, but 2 unfinished") as error:
        load_results(outputs, experiment="a")
    assert "resumes unfinished runs" in error.value.remedy
    with pytest.raises(NoRunsError, match="no finished run of experiment 'c'") as error:
        load_results(outputs, experiment="c")
    assert "choose one of b" in error.value.remedy
    gather(tmp_path / "runs", to=outputs / "a")
    assert list(load_results(outputs / "a")["run_id"]) == ["2"], "a ledger beside what is begun"
