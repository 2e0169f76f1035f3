"""What is read of a tree of runs, also while others write to it, and what is refused."""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.runs import ledger
from sparsepipe.runs.ledger import LOCK, gather, load_results, read_tree, run_directories
from sparsepipe.utils.files import file_lock, write_csv

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "experiments" / "modelnet40_points" / "result.json"

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a run's directory, as a run leaves it."""

    def make(name: str, run_id: str, *, done: bool = True, **result: Any) -> Path:
        path = tmp_path / "outputs" / name / run_id
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"name: {name}\n")
        told = {"run_id": run_id, "name": name, "kind": "measured", **result}
        (path / "result.json").write_text(json.dumps(told))
        if done:
            (path / "DONE.json").write_text(json.dumps({"run_id": run_id, "time": 1e9}))
        return path

    return make


def ids(*arguments: Any, **more: Any) -> list[str]:
    return list(load_results(*arguments, **more)["run_id"])


def test_finished_runs_only_and_nothing_beside_them(make: Make, tmp_path: Path) -> None:
    make("b", "1", seed=1)
    make("a", "3", seed=2)
    make("a", "2", seed=3)
    make("a", "0", done=False)
    begun = make("a", "4", done=False)
    (begun / "result.json").unlink()
    removed = make("a", ".5.123")  # in which a run is being removed
    assert (removed / "DONE.json").exists()
    inside = make("a/2/checkpoints", "9")
    assert inside.exists()
    (tmp_path / "outputs" / "a" / "sweeps" / "now").mkdir(parents=True)
    (tmp_path / "outputs" / "README.md").write_text("runs")
    frame = load_results(tmp_path / "outputs")
    assert list(zip(frame["name"], frame["run_id"], frame["seed"], strict=True)) == [
        ("a", "2", 3),
        ("a", "3", 2),
        ("b", "1", 1),
    ]
    assert ids(tmp_path / "outputs" / "a") == ["2", "3"]
    assert ids(tmp_path / "outputs" / "b" / "1") == ["1"]
    assert ids(tmp_path / "outputs", experiment="b") == ["1"]


def test_kinds(make: Make, tmp_path: Path) -> None:
    make("a", "1", kind="simulated")
    make("a", "2", kind="emulated")
    make("b", "3")
    root = tmp_path / "outputs"
    assert ids(root, kind="simulated") == ["1"]
    assert ids(root, kind="measured") == ["3"]
    assert ids(root, experiment="a", kind="emulated") == ["2"]
    with pytest.raises(DataError, match="no finished run of kind 'measured'") as error:
        load_results(root, experiment="a", kind="measured")
    assert "emulated, simulated" in error.value.remedy


def test_an_experiment_is_a_directory_or_a_name(make: Make, tmp_path: Path) -> None:
    make("a", "1")
    make("b", "2")
    gather(tmp_path / "outputs", to=tmp_path)
    assert ids(tmp_path / "ledger.csv", experiment="b") == ["2"]
    assert ids(tmp_path / "outputs" / "b", experiment="b") == ["2"]
    (tmp_path / "outputs" / "b").rename(tmp_path / "outputs" / "renamed")
    assert ids(tmp_path / "outputs", experiment="renamed") == ["2"]
    with pytest.raises(DataError, match="no finished run of experiment 'c'") as error:
        load_results(tmp_path / "outputs", experiment="c")
    assert "a, b" in error.value.remedy


def test_a_broken_result_is_named_and_the_others_count(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("a", "1")
    for run_id, content in (("2", '{"half": '), ("3", "[1]"), ("4", ""), ("5", None)):
        result = make("a", run_id) / "result.json"
        result.unlink() if content is None else result.write_text(content)
    (tmp_path / "outputs/a/6").mkdir()
    (tmp_path / "outputs/a/6/result.json").write_bytes(b'{"name": "\xff"}')
    (tmp_path / "outputs/a/6/DONE.json").touch()
    with caplog.at_level(logging.WARNING):
        assert ids(tmp_path / "outputs") == ["1"]
    assert len(caplog.messages) == 5
    for run_id, message in zip("23456", caplog.messages, strict=True):
        run = tmp_path / "outputs" / "a" / run_id
        assert str(run / "result.json") in message
        assert f"remove {run / 'DONE.json'} and give the run's command again" in message
    (tmp_path / "outputs/a/1/result.json").write_text("")
    with pytest.raises(DataError, match="no finished run, but 6 with a broken result"):
        load_results(tmp_path / "outputs")


def test_a_run_that_is_there_twice(make: Make, tmp_path: Path) -> None:
    run = make("a", "1")
    make("b", "1")
    assert ids(tmp_path / "outputs") == ["1", "1"], "one computation under two names"
    copy = shutil.copytree(run, tmp_path / "outputs" / "a" / "copy of 1")
    with pytest.raises(DataError, match="run 1 of experiment a is in") as error:
        load_results(tmp_path / "outputs")
    assert str(run) in error.value.message
    assert str(copy) in error.value.message
    assert "remove the copy" in error.value.remedy
    with pytest.raises(DataError, match="run 1 of experiment a is in"):
        gather(tmp_path / "outputs" / "a")


def test_links_lead_to_runs_once(make: Make, tmp_path: Path) -> None:
    make("a", "1")
    elsewhere = tmp_path / "disk"
    (tmp_path / "outputs" / "a").rename(elsewhere)
    (tmp_path / "outputs" / "a").symlink_to(elsewhere)
    (elsewhere / "latest").symlink_to(elsewhere / "1")
    (elsewhere / "round").symlink_to(tmp_path / "outputs")
    assert ids(tmp_path / "outputs") == ["1"]


@pytest.mark.parametrize(
    ("where", "message", "remedy"),
    [
        ("nowhere", "nowhere not found", "paths.outputs"),
        ("empty", "empty has no finished run", "sparsepipe -m experiment="),
        ("begun", "begun has no finished run, but 1 unfinished", "resumes unfinished"),
        ("table.csv", "valid ledger: its first row lacks kind and run_id", "directory of its runs"),
        ("none.csv", "is not a valid ledger", "gather"),
        ("torn.csv", "is not a valid ledger", "gather"),
        ("text.parquet", "is not a valid ledger", "gather"),
        ("twice.csv", "has run 1 of experiment a more than once", "gather"),
    ],
)
def test_refused(make: Make, tmp_path: Path, where: str, message: str, remedy: str) -> None:
    (tmp_path / "empty").mkdir()
    make("a", "1", done=False).parent.rename(tmp_path / "begun")
    write_csv(tmp_path / "table.csv", [{"seed": 1, "status": "finished"}])
    (tmp_path / "none.csv").touch()
    (tmp_path / "torn.csv").write_text("run_id,kind\n1,measured,more\n")
    (tmp_path / "text.parquet").write_text("run_id,kind\n")
    write_csv(tmp_path / "twice.csv", [{"run_id": '"1"', "name": "a", "kind": "measured"}] * 2)
    with pytest.raises(DataError) as error:
        load_results(tmp_path / where)
    assert re.search(message, error.value.message)
    assert remedy in error.value.remedy


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_nothing_is_gathered_of_nothing(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        gather(tmp_path / where)
    assert {path.name for path in tmp_path.rglob("*")} <= {"empty", LOCK}


def test_a_directory_with_a_ledger_and_no_runs(make: Make, tmp_path: Path) -> None:
    """As a recorded experiment has it; where there are runs, these count."""
    make("a", "1")
    recorded = tmp_path / "experiments" / "a"
    frame = gather(tmp_path / "outputs" / "a", to=recorded)
    for name in ("ledger.parquet", "ledger.csv"):
        assert_frame_equal(load_results(recorded), frame)
        assert_frame_equal(load_results(recorded.parent, experiment="a"), frame)
        (recorded / name).unlink()
    gather(tmp_path / "outputs" / "a")
    make("a", "2")
    assert ids(tmp_path / "outputs" / "a") == ["1", "2"]
    assert ids(tmp_path / "outputs" / "a" / "ledger.csv") == ["1"]


def test_ledgers_of_several_directories_are_read_together(make: Make, tmp_path: Path) -> None:
    """Those of an experiment, whatever their directories are called; a run that is in two once."""
    outputs, recorded = tmp_path / "outputs", tmp_path / "experiments"
    first = make("a", "1", seed=1)
    make("a", "2", seed=2)
    gather(outputs / "a", to=recorded / "a")
    shutil.rmtree(first)
    make("a", "4", seed=4)
    gather(outputs / "a", to=recorded / "a_on_other_data")
    gather(make("b", "3").parent, to=recorded / "c" / "b")
    assert ids(recorded, experiment="a") == ["1", "2", "4"]
    assert ids(recorded, experiment="b") == ["3"]
    assert ids(recorded) == ["1", "2", "4", "3"]
    with pytest.raises(DataError, match="no finished run of experiment 'd'") as error:
        load_results(recorded, experiment="d")
    assert "a, b" in error.value.remedy
    (outputs / "a").rename(recorded / "a" / "runs")  # which are newer than the ledger beside them
    assert ids(recorded, experiment="a") == ["2", "4"]
    make("a", "5")
    (outputs / "a").rename(recorded / "a on a third machine")
    assert ids(recorded) == ["2", "4", "5", "3"], "runs and ledgers"


def test_a_ledger_is_the_same_whenever_it_is_written(make: Make, tmp_path: Path) -> None:
    for run_id in ("c", "a", "b"):
        make("x", run_id, epochs=3, **{f"test/{run_id}": 0.5})
    root = tmp_path / "outputs" / "x"
    gather(root)
    first = [(root / name).read_bytes() for name in ("ledger.parquet", "ledger.csv")]
    shutil.move(root / "b", root / "z")  # other places, other order of listing
    shutil.move(root / "z", root / "b")
    gather(root)
    assert first == [(root / name).read_bytes() for name in ("ledger.parquet", "ledger.csv")]
    names = {path.name for path in root.iterdir()}
    assert names == {"a", "b", "c", "ledger.parquet", "ledger.csv", LOCK}


def test_a_ledger_that_cannot_be_written_leaves_the_old_one(make: Make, tmp_path: Path) -> None:
    make("x", "a")
    root = tmp_path / "outputs" / "x"
    with pytest.raises(DataError, match="cannot be written"):
        gather(root, to=root / "a" / "DONE.json")
    gather(root)
    old = (root / "ledger.parquet").read_bytes()
    (root / "ledger.csv").unlink()
    (root / "ledger.csv").mkdir()  # in the way of the second file
    make("x", "b")
    with pytest.raises(DataError, match=r"ledger\.csv cannot be written"):
        gather(root)
    assert (root / "ledger.parquet").read_bytes() != old
    names = {path.name for path in root.iterdir()}
    assert names == {"a", "b", "ledger.parquet", "ledger.csv", LOCK}


def test_runs_of_older_versions(make: Make, tmp_path: Path) -> None:
    """A recorded result of the first versions, and one that has hardly anything."""
    run = make("modelnet40_points", "5b0a213d4e31")
    shutil.copy(RECORDED, run / "result.json")
    bare = make("bare", "1")
    (bare / "result.json").write_text('{"kind": "simulated"}')
    (bare / "DONE.json").write_text("")
    first, second = load_results(tmp_path / "outputs").to_dict("records")
    assert (first["name"], first["run_id"], first["kind"]) == ("bare", "1", "simulated")
    assert second["test/accuracy"] == json.loads(RECORDED.read_text())["test/accuracy"]
    assert second["finished_at"] == "2001-09-09T01:46:40+00:00"
    assert json.loads(second["data.augment.scale"]) == [0.75, 1.25]


def test_nobody_waits_for_pandas_who_reads_no_ledger() -> None:
    heavy = "import sys, sparsepipe, sparsepipe.runs.ledger, sparsepipe.cli\n"
    told = "print([name for name in ('pandas', 'pyarrow') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", heavy + told],
        check=True, capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ROW = {"run_id": "7", "name": "theirs", "kind": "measured"}


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
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("b", "2")
    gather(tmp_path / "outputs", to=tmp_path / "outputs" / "recorded")
    shutil.rmtree(tmp_path / "outputs" / "b")
    make("a", "1")
    others = leave_others(tmp_path / "outputs")
    for experiment, found in (("a", ["1"]), ("b", ["2"]), (None, ["1", "2"])):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert ids(tmp_path / "outputs", experiment=experiment) == found
        assert len(caplog.messages) == len(others) == 3
        for file, message in zip(others, caplog.messages, strict=True):
            assert message.startswith(str(file))
            assert "the ledger is left out. remedy: write it anew" in message


def test_where_nothing_else_is_there_no_run_is_finished(tmp_path: Path) -> None:
    leave_others(tmp_path / "outputs")
    with pytest.raises(NoRunsError, match="outputs has no finished run"):
        load_results(tmp_path / "outputs", experiment="a")


@pytest.mark.parametrize("name", ["books", "pointer", "twice"])
def test_a_given_file_that_is_no_ledger_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    """By its directory or by the name of an experiment, as by its own."""
    outputs = make("a", "1").parents[1]
    (file,) = [path for path in leave_others(outputs) if path.parent.name == name]
    for where, experiment in ((file, None), (outputs / name, None), (outputs, name)):
        with pytest.raises(DataError, match=r"is not a valid ledger|more than once") as error:
            load_results(where, experiment=experiment)
        assert error.value.message.startswith(str(file))


def test_unfinished_runs_are_named_rather_than_other_experiments(
    make: Make, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    make("b", "2").parent.rename(tmp_path / "runs")
    gather(tmp_path / "runs", to=outputs / "recorded")
    for run_id in ("1", "3"):
        make("a", run_id, done=False)
    with pytest.raises(NoRunsError, match="a has no finished run, but 2 unfinished") as error:
        load_results(outputs, experiment="a")
    assert "resumes unfinished runs" in error.value.remedy
    with pytest.raises(NoRunsError, match="no finished run of experiment 'c'") as error:
        load_results(outputs, experiment="c")
    assert "choose one of b" in error.value.remedy
    gather(tmp_path / "runs", to=outputs / "a")
    assert list(load_results(outputs / "a")["run_id"]) == ["2"], "a ledger beside what is begun"


GATHERING = """
from sparsepipe.runs.ledger import gather
print("begun")
print(len(gather("outputs/swept")))
"""


def test_who_waits_reads_what_has_been_finished_meanwhile(make: Make, tmp_path: Path) -> None:
    """Else it would write the rows of before over those of who was quicker."""
    place = make("swept", "1").parent
    command = [sys.executable, "-u", "-c", GATHERING]
    with file_lock(place / LOCK):
        other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        time.sleep(0.5)
        make("swept", "2")
    assert other.communicate(timeout=120)[0] == "2\n"
    assert ids(place / "ledger.csv") == ["1", "2"]


def test_whoever_holds_it_for_ever_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_LIMIT_S", 0.1)
    place = make("swept", "1").parent
    with (place / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"writing the ledger in .*swept for 0\.1 s"):
            gather(place)
    assert not (place / "ledger.csv").exists()
    assert len(gather(place)) == 1


def test_a_directory_may_go_before_it_is_looked_into(make: Make, tmp_path: Path) -> None:
    first = make("a", "1")
    other = make("b", "2")
    found = run_directories(tmp_path)
    assert next(found) == first
    shutil.rmtree(other.parent)
    assert list(found) == []


def test_a_run_may_be_started_anew_while_it_is_read(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, anew = make("a", "1"), make("a", "2")
    read = ledger.read_mapping

    def while_others_work(path: Path, **needed: Any) -> Any:
        if anew in path.parents and anew.exists():
            shutil.rmtree(anew)
        return read(path, **needed)

    monkeypatch.setattr(ledger, "read_mapping", while_others_work)
    with caplog.at_level(logging.WARNING):
        tree = read_tree(tmp_path)
    assert list(tree.rows) == [kept]
    assert (tree.unfinished, tree.broken) == ([anew], [])
    assert not caplog.messages
