"""The task predict: files of any formats, a row for each of them."""

from __future__ import annotations

import csv
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trimesh

import sparsepipe
from sparsepipe.errors import CheckpointError, ConfigError, DataError, SparsePipeError
from sparsepipe.launch.job import run_job
from sparsepipe.tasks.predict import find_files
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed

TRAINED = (
    *("data=folder", "data.root=parts", "model=sparse_vgg11_bn", "optim=sgd_onecycle"),
    *("data.cached_points=512", "data.num_points=256", "data.resolution=12", "data.batch_size=4"),
    *("data.num_workers=0", "data.cache_workers=1", "model.width=0.0625", "trainer.max_epochs=3"),
    *("hardware.accelerator=cpu", "task.gallery=0", "seed=3"),
)
MEASURED = (
    *("task=evaluate", "task.gallery=0", "task.timed_batches=0", "task.warmup_batches=0"),
    "hardware.accelerator=cpu",
)
COLUMNS = "file class probability second second_probability third third_probability error remedy"


def shape(name: str, number: int) -> trimesh.Trimesh:
    match name:
        case "ball":
            return trimesh.creation.icosphere(2, radius=1 + number)
        case "box":
            return trimesh.creation.box([1, 1 + number / 8, 1])
    return trimesh.creation.cylinder(radius=1, height=2 + number / 4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with folders of classes, mixed formats, and new files of somebody's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("predicted"))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("ball", "box", "tube"):
            Path("parts", name).mkdir(parents=True)
            for number in range(8):
                suffix = ("stl", "ply", "glb")[number % 3]
                shape(name, number).export(Path("parts", name, f"{number}.{suffix}"))
        Path("parts/box/notes.md").touch()
        Path("new", "deeper").mkdir(parents=True)
        shape("ball", 9).export("new/round.obj")
        shape("box", 9).export("new/deeper/$square$.off")
        np.save("new/cloud.npy", shape("tube", 9).sample(400, seed=0).astype(np.float32))
        np.savetxt("new/short.xyz", shape("ball", 9).sample(40, seed=0))
        Path("new/broken.stl").write_text("junk")
        os.mkfifo("new/pipe.stl")
        os.symlink("nowhere", "new/link.ply")
        for name in ("new/a.mtl", "new/b.png", "new/.DS_Store"):
            Path(name).touch()
        yield Path.cwd()


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    return run_job(composed(*TRAINED)).path


def predicted(run: Path, files: str, *overrides: str) -> Path:
    words = ("task=predict", f"checkpoint={run}", f"input={files}", "hardware.accelerator=cpu")
    return run_job(composed(*words, *overrides)).path


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "predictions.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_folder_has_a_row_for_each_file(
    run: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = predicted(run, "new")
    rows = {row["file"]: row for row in table(directory)}
    assert list(rows) == [
        *("new/broken.stl", "new/cloud.npy", "new/deeper/$square$.off", "new/link.ply"),
        *("new/pipe.stl", "new/round.obj", "new/short.xyz"),
    ]
    assert list(rows["new/round.obj"]) == COLUMNS.split()
    broken = rows.pop("new/broken.stl")
    assert "new/broken.stl holds no shape" in broken["error"]
    assert "replace it" in broken["remedy"]
    assert not broken["class"]
    assert (
        rows.pop("new/link.ply")["error"]
        == "new/link.ply cannot be read: No such file or directory"
    )
    assert "is a pipe" in rows.pop("new/pipe.stl")["error"]
    for row in rows.values():
        assert {row["class"], row["second"], row["third"]} == {"ball", "box", "tube"}
        shares = [float(row[name]) for name in row if "probability" in name]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1)
        assert not row["error"]
    values = read_json(directory / "predictions.json")
    assert values["classes"] == ["ball", "box", "tube"]
    assert Path(values["checkpoint"]).parent.parent == run
    assert [each["file"] for each in values["predictions"]] == list(rows)
    first = values["predictions"][0]
    assert str(first["probability"]) == rows[first["file"]]["probability"]
    assert [each["class"] for each in first["next"]] == [
        rows[first["file"]][name] for name in ("second", "third")
    ]
    unreadable = ["new/broken.stl", "new/link.ply", "new/pipe.stl"]
    assert [each["file"] for each in values["unreadable"]] == unreadable
    assert (directory / "predictions.png").stat().st_size > 1_000
    result = read_json(directory / "result.json")
    assert (result["predicted_files"], result["unreadable_files"]) == (4, 3)
    assert (result["task_name"], result["evaluated_checkpoint"]) == ("predict", "last.ckpt")
    assert result.keys().isdisjoint({"input", "checkpoint"}), "paths are no settings"
    assert "skipped files of other formats: 1 .mtl, 1 .png" in caplog.text
    assert "3 files cannot be read:\n  new/broken.stl holds no shape" in caplog.text
    (answer,) = (text for text in caplog.messages if text.startswith("new/round.obj: "))
    assert answer.startswith(f"new/round.obj: {rows['new/round.obj']['class']} ")
    caplog.clear()
    assert predicted(run, "new") == directory
    assert "finished before, nothing to do: the results are in" in caplog.text


def test_other_or_changed_files_are_another_run(run: Path, place: Path) -> None:
    shutil.copytree("new", "changing", ignore=shutil.ignore_patterns("pipe.stl", "link.ply"))
    first = predicted(run, "changing", "task.gallery=-1")
    assert predicted(run, f"{place}/changing", "data.batch_size=1") == first
    shape("box", 3).export("changing/round.obj")
    os.rename(b"changing/short.xyz", b"changing/short\xff.xyz")
    second = predicted(run, "changing")
    Path("changing/broken.stl").unlink()
    third = predicted(run, "changing", "task.gallery=0")
    assert len({first, second, third}) == 3
    before, after = ({r["file"]: r for r in table(each)} for each in (first, second))
    assert before.pop("changing/round.obj") != after.pop("changing/round.obj")
    assert before.pop("changing/short.xyz")
    assert after.pop("changing/short\\udcff.xyz")["class"], "whose name is no text"
    assert before == after, "what is predicted of a file depends on nothing but it"
    assert not (first / "predictions.png").exists()


def test_files_of_the_test_are_predicted_as_evaluated(run: Path, place: Path) -> None:
    tested = table(run_job(composed(*MEASURED, f"checkpoint={run}")).path)
    assert len(tested) == 6
    rows = {row["file"]: row for row in table(predicted(run, f"{place}/parts/**/*"))}
    assert len(rows) == 24
    for row in tested:
        again = rows[row["file"]]
        assert again["class"] == row["predicted"]
        assert float(again["probability"]) == pytest.approx(float(row["probability"]), abs=1e-6)
    other = composed(*MEASURED, f"checkpoint={run}", "data.split=0.5")
    assert len(table(run_job(other).path)) == 12, "other samples are the same kind of input"


def test_a_training_is_used_from_any_directory(
    run: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = run_job(composed(*MEASURED, f"checkpoint={run}"))
    monkeypatch.chdir(tmp_path)
    there = run_job(composed(*MEASURED, f"checkpoint={run}"))
    assert there.run_id == here.run_id
    assert table(there.path) == table(here.path)
    assert not Path("data").exists(), "the cache is that of the training"
    caplog.set_level(logging.INFO)
    model = sparsepipe.load(run)
    for row in table(here.path):
        found = model.predict(row["file"])
        assert found.probability == pytest.approx(float(row["probability"]), abs=1e-6)
    assert "files and folders are ignored" not in caplog.text, (
        "nobody asked about the data of the training"
    )
    (place / "parts").rename(place / "moved")
    try:
        with pytest.raises(DataError, match=r"parts is not a directory.*data.root is that of"):
            run_job(composed(*MEASURED, f"checkpoint={run}"))
        moved = (*MEASURED, f"checkpoint={run}", f"data.root={place}/moved")
        assert run_job(composed(*moved)).run_id == here.run_id
    finally:
        (place / "moved").rename(place / "parts")


def test_an_epoch_that_ends_with_a_single_shape_is_explained(place: Path) -> None:
    settings = ("model=dense_vgg11_bn", "data.batch_size=17")  # of 18 shapes
    with pytest.raises(ConfigError, match="sees a single value of each channel") as caught:
        run_job(composed(*TRAINED, *settings))
    assert "data.batch_size" in caught.value.remedy


def test_files_that_are_found(place: Path) -> None:
    one, others = find_files("new/b.png")
    assert (one, dict(others)) == ([Path("new/b.png")], {}), "as it is named, it is wanted"
    assert find_files("new/*")[0] == [
        *(Path("new", name) for name in ("broken.stl", "cloud.npy", "link.ply", "pipe.stl")),
        *(Path("new", name) for name in ("round.obj", "short.xyz")),
    ]
    Path("[odd]").mkdir()
    shutil.copy("new/round.obj", "[odd]/UPPER.OBJ")
    assert find_files("[odd]")[0] == [Path("[odd]/UPPER.OBJ")]
    assert find_files("[odd]/UPPER.OBJ")[0] == [Path("[odd]/UPPER.OBJ")]


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ("nowhere", ConfigError, "no file or folder matches nowhere"),
        ("outputs/*/*/*.json", ConfigError, r"names no shape file, only \d+ .json"),
        ("new/b.png", DataError, "new/b.png does not have the suffix"),
        ("null", ConfigError, "task=predict needs input"),
        ("", ConfigError, "an empty path"),  # as a variable that is not set leaves it
        ("/", ConfigError, "is the whole file system"),  # of $PARTS/
    ],
)
def test_what_holds_no_shape_is_refused(
    run: Path, files: str, error: type[SparsePipeError], message: str
) -> None:
    before = sorted(Path("outputs").glob("*/*/"))
    with pytest.raises(error, match=message) as caught:
        predicted(run, files)
    assert caught.value.remedy
    assert sorted(Path("outputs").glob("*/*/")) == before, "nothing is left of it"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("checkpoint=null",), ConfigError, "task=predict needs a checkpoint"),
        (("checkpoint=nowhere",), CheckpointError, "no checkpoint at nowhere"),
        (("data.resolution=8",), ConfigError, r"data.resolution=8 \(trained with 12\)"),
        (("task=evaluate",), ConfigError, "task=evaluate does not read"),
    ],
)
def test_what_is_not_of_the_training_is_refused(
    run: Path, words: tuple[str, ...], error: type[SparsePipeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        predicted(run, "new", *words)
