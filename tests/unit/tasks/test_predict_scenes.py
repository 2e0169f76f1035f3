"""The task predict on scenes: what it writes for each format, beside readers of their own."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

import sparsepipe
from sparsepipe.errors import ConfigError, DataError, OutputError
from sparsepipe.launch.job import run_job
from sparsepipe.runs.model import SceneModel
from sparsepipe.utils.files import read_csv, read_json
from tests.support.command_line import composed
from tests.support.labelled_scenes import (
    CLASSES,
    ORIGIN,
    RAW,
    TRAINING,
    room,
    write_ply,
    write_scenes,
)
from tests.support.picture_checks import has_colour


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A training on height alone; new scenes of several formats in the folder new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("labelled"))
        patch.setenv("OMP_NUM_THREADS", "1")
        write_scenes(Path("scenes"))
        found = run_job(composed(*TRAINING, "data.features=[height]")).path
        Path("map.yaml").unlink()  # a checkpoint knows what it maps
        write_ply(Path("new/a/scan.ply"), 5)
        write_ply(Path("new/unknown.ply"), 6, values=(3, 4, 5))
        points_P3, labels_P = room(7)
        cloud_P4 = np.c_[points_P3, points_P3[:, 2]].astype("<f4")
        cloud_P4[3, 0] = np.nan
        Path("new/b").mkdir()
        cloud_P4.tofile("new/b/scan.bin")
        np.array(RAW, "<u4")[labels_P].tofile("new/b/scan.label")
        Path("new/prepared").mkdir()
        np.save("new/prepared/coord.npy", points_P3 + ORIGIN)
        np.savez("new/a/scan.npz", coord=points_P3)
        Path("new/broken.ply").write_text("junk")
        Path("new/notes.md").touch()
        yield found


@pytest.fixture(scope="module")
def directory(run: Path) -> Path:
    return predicted(run, "new").rename("answers")


def predicted(run: Path, files: str, *overrides: str) -> Path:
    words = ("task=predict", f"checkpoint={run}", f"input={files}", "hardware.accelerator=cpu")
    return run_job(composed(*words, *overrides)).path


def vertices(path: Path) -> tuple[list[str], np.ndarray]:
    """The comments and rows of a binary PLY file of vertices alone."""
    head, _, body = path.read_bytes().partition(b"end_header\n")
    lines = head.decode().splitlines()
    kinds = {"double": "<f8", "float": "<f4", "int": "<i4", "uchar": "u1"}
    fields = [line.split()[1:] for line in lines if line.startswith("property")]
    table = np.frombuffer(body, [(name, kinds[kind]) for kind, name in fields])
    assert f"element vertex {len(table)}" in lines
    return [line.partition(" ")[2] for line in lines if line.startswith("comment")], table


def test_each_scene_gets_labels_colours_and_its_exact_positions(run: Path, directory: Path) -> None:
    files = {each.relative_to(directory / "scenes").as_posix() for each in directory.rglob("*.ply")}
    assert files == {
        "a/scan.ply.ply",
        "a/scan.npz.ply",
        "b/scan.ply",
        "unknown.ply",
        "prepared.ply",
    }
    model, points_P3 = sparsepipe.load(run), room(7)[0]
    for name, source, exact_P3 in (
        ("a/scan.ply", "a/scan.ply", room(5)[0] + ORIGIN),
        ("prepared", "prepared", points_P3 + ORIGIN),
        ("b/scan", "b/scan.bin", points_P3.astype(np.float32)),
    ):
        comments, table = vertices(directory / f"scenes/{name}.ply")
        assert comments == [f"label {v} {c}" for v, c in zip(RAW, CLASSES, strict=True)]
        positions_P3 = np.stack([table[axis] for axis in "xyz"], 1)
        found = model.predict(f"new/{source}")
        seen_P = found.labels_P >= 0
        assert np.array_equal(positions_P3[seen_P], exact_P3[seen_P])
        assert (~seen_P).sum() == (name == "b/scan")
        assert np.array_equal(table["label"][seen_P], np.array(RAW)[found.labels_P[seen_P]])
        assert (table["label"][~seen_P] == -1).all()
        best_P = found.probabilities_PK[seen_P].max(1)
        np.testing.assert_allclose(table["probability"][seen_P], best_P, rtol=1e-6)
        colors = {(*row,) for row in table[["label", "red", "green", "blue"]][seen_P].tolist()}
        assert len(colors) == len({label for label, *_ in colors}), "one colour a class"
    labels = np.fromfile(directory / "scenes/b/scan.label", "<u4")
    assert np.array_equal(labels, np.maximum(table["label"], 0))
    assert not (directory / "scenes/a/scan.ply.label").exists()


def test_tables_count_the_points_and_compare_known_labels(run: Path, directory: Path) -> None:
    rows = {row["file"]: row for row in read_csv(directory / "predictions.csv", "file")}
    assert "is not a valid scene" in rows["new/broken.ply"]["error"]
    assert rows["new/broken.ply"]["remedy"]
    classes = read_csv(directory / "classes.csv", "file", "class")
    model, total = sparsepipe.load(run), np.zeros((3, 3), int)
    for file, row in rows.items():
        own = [each for each in classes if each["file"] == file]
        if row["error"]:
            assert not own
            continue
        found = model.predict(file)
        points_K = [int((found.labels_P == k).sum()) for k in range(3)]
        assert [int(each["points"]) for each in own] == points_K
        assert sum(float(each["share"]) for each in own) == pytest.approx(1)
        has_labels = file in ("new/a/scan.ply", "new/b/scan.bin")
        assert (row["accuracy"] != "") == has_labels, "labels of no class are not compared"
        if has_labels:
            true_P = room(5 if file.endswith("ply") else 7)[1]
            seen_P = found.labels_P >= 0
            hits_P = (true_P == found.labels_P)[seen_P]
            assert float(row["accuracy"]) == pytest.approx(hits_P.mean())
            np.add.at(total, (true_P[seen_P], found.labels_P[seen_P]), 1)
            assert [int(each["true_points"]) for each in own] == np.bincount(
                true_P[seen_P]
            ).tolist()
    confusion = read_csv(directory / "confusion.csv", "points")
    assert [int(row["points"]) for row in confusion] == total.ravel().tolist()
    result, known = (read_json(directory / f"{name}.json") for name in ("result", "predictions"))
    assert result["accuracy"] == pytest.approx(np.trace(total) / total.sum())
    assert (result["predicted_files"], result["unreadable_files"]) == (5, 1)
    written = [name for each in known["predictions"] for name in each["written"]]
    assert {*written} == {
        each.relative_to(directory).as_posix() for each in directory.glob("scenes/**/*.*")
    }


def test_a_scene_is_drawn_from_two_sides_and_on_a_page_of_its_own(directory: Path) -> None:
    pictures = sorted(directory.glob("scenes/**/*.png"))
    assert len(pictures) == 5
    image = np.rint(imread(directory / "scenes/a/scan.ply.png") * 255)[..., :3]
    true, width = image[len(image) // 2 :], image.shape[1]
    for side in (true[:, : width // 2], true[:, width // 2 : width * 85 // 100]):  # no legend
        assert all(has_colour(side, colour) > 50 for colour in ("#1f77b4", "#ff7f0e", "#2ca02c"))
    text = (directory / "scenes/a/scan.ply.html").read_text()
    assert not re.search(r"(src|href)=|https?://|import ", text), "it needs no other file"
    columns = json.loads(re.search(r"const columns = (\{.*?\}),", text).group(1))
    places = np.frombuffer(base64.b64decode(columns["places"]), "<u2").reshape(-1, 3)
    points_P3 = room(5)[0]
    near_P3 = points_P3 - points_P3.min(0)
    assert np.abs(places * near_P3.max() / 65535 - near_P3).max() < 1e-4
    labels_P = np.frombuffer(base64.b64decode(columns["layer:prediction"]), np.uint8)
    raw_P = vertices(directory / "scenes/a/scan.ply.ply")[1]["label"]
    assert np.array_equal(np.array(RAW)[labels_P], raw_P)
    true_P = np.frombuffer(base64.b64decode(columns["layer:true class"]), np.uint8)
    assert np.array_equal(true_P, room(5)[1])
    assert len(base64.b64decode(columns["color"])) == 3 * len(places)


def test_a_las_file_keeps_everything_but_its_classification(run: Path) -> None:
    laspy = pytest.importorskip("laspy")
    las = laspy.create(point_format=1, file_version="1.2")
    las.header.offsets, las.header.scales = ORIGIN, [0.001] * 3
    points_P3, labels_P = room(8)
    las.xyz = points_P3 + ORIGIN
    las.intensity, las.gps_time = np.arange(len(labels_P)), np.linspace(0, 1, len(labels_P))
    las.classification = np.array([1, 10, 20])[labels_P]
    las.scan_angle_rank = np.arange(len(labels_P)) % 180 - 90
    las.write("one.las")
    found = laspy.read(predicted(run, "one.las", "task.gallery=0") / "scenes/one.las")
    assert np.array_equal(found.xyz, laspy.read("one.las").xyz)
    assert np.array_equal(found.intensity, las.intensity)
    assert np.array_equal(found.gps_time, las.gps_time)
    np.testing.assert_allclose(found.scan_angle * 0.006, las.scan_angle_rank, atol=0.003)
    expected = sparsepipe.load(run).predict("one.las").labels_P
    assert np.array_equal(found.classification, np.array(RAW)[expected]), "one exceeds 31"


def test_one_folder_is_one_scene_and_a_pattern_names_some(run: Path) -> None:
    for files, count in (("new/prepared", 1), ("new/**/scan.*", 3), ("new/a", 2)):
        rows = read_csv(predicted(run, files, "task.gallery=0") / "predictions.csv", "file")
        assert len(rows) == count
    with pytest.raises(ConfigError, match="names no scene"):
        predicted(run, "new/notes.m*")
    with pytest.raises(DataError, match="none of 1 scenes can be labelled"):
        predicted(run, "new/broken.ply")


def test_a_run_that_cannot_write_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OutputError("the disk is full", remedy="free space")

    monkeypatch.setattr("sparsepipe.tasks.predict_scenes.write_scene", full)
    with pytest.raises(OutputError):
        predicted(run, "new/a/scan.npz", "task.gallery=0")


def test_blocks_and_flips_make_other_runs_and_their_defaults_do_not(run: Path) -> None:
    same, other = (
        composed("task=predict", f"checkpoint={run}", "input=new", *more)
        for more in (("task.block_voxels=500000", "task.flips=false"), ("task.flips=true",))
    )
    assert not {"task.flips", "task.block_voxels"} & same.identity().keys()
    assert other.identity()["task.flips"] is True
    found = predicted(run, "new/a/scan.ply", "task.block_voxels=50", "task.flips=true")
    expected: SceneModel = sparsepipe.load(run)
    labels_P = expected.predict("new/a/scan.ply", block_voxels=50, flips=True).labels_P
    table = vertices(found / "scenes/scan.ply")[1]
    assert np.array_equal(table["label"], np.array(RAW)[labels_P])
    shutil.rmtree(found)
