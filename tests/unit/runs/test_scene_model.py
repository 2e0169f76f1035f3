"""A loaded model labels every point of a scene as its test did, in blocks and mirrored too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsepipe
from sparsepipe.data.scenes.reader import read_scene
from sparsepipe.errors import DataError
from sparsepipe.launch.job import run_job
from sparsepipe.runs.model import SceneModel, blocks
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.files import read_csv
from tests.support.command_line import composed
from tests.support.labelled_scenes import CLASSES, TRAINING, room, write_scenes
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("labelled"))
        patch.setenv("OMP_NUM_THREADS", "1")
        write_scenes(Path("scenes"))
        yield run_job(composed(*TRAINING, "data.features=[color,height]")).path


@pytest.fixture(scope="module")
def model(run: Path) -> SceneModel:
    return sparsepipe.load(run)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_scenes_of_the_test_are_labelled_as_the_test_did(run: Path, precision: str) -> None:
    if precision != "32-true":
        more = ("data.features=[color,height]", f"trainer.precision={precision}")
        run = run_job(composed(*TRAINING, *more)).path
    model, counts = sparsepipe.load(run), np.zeros((3, 3), int)
    for file in sorted(Path("scenes/test").glob("*.ply")):
        scene, found = read_scene(file, learning_map="map.yaml"), model.predict(file)
        assert found.probabilities_PK.sum(1) == pytest.approx(1, abs=1e-5)
        assert np.array_equal(found.labels_P, found.probabilities_PK.argmax(1))
        np.add.at(counts, (scene.labels_P, found.labels_P), 1)
    rows = read_csv(run / "confusion.csv", "actual", "predicted", "points")
    tested = {(row["actual"], row["predicted"]): int(row["points"]) for row in rows}
    assert model.classes == CLASSES
    assert tested == {
        (a, b): counts[i, j] for i, a in enumerate(CLASSES) for j, b in enumerate(CLASSES)
    }


def test_what_the_documents_show_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/predict.md").read_text()
    (block,) = re.findall(r"^```python\n((?:(?!^```).)*probabilities_PK.*?)^```", text, re.M | re.S)
    points_P3, labels_P = room(3)
    code = re.sub(r'"outputs/[^"]*"', repr(str(run)), block)
    exec(code, {"points": points_P3, "colors": colors(labels_P)})
    assert capsys.readouterr().out.split()[0] in CLASSES


def colors(labels_P: np.ndarray) -> np.ndarray:
    """Returns the colours of the files, as bytes."""
    return np.stack([60 * labels_P, 0 * labels_P + 128, 255 - 60 * labels_P], 1).astype(np.uint8)


def test_arrays_are_labelled_as_their_file_is_point_by_point(model: SceneModel) -> None:
    expected = model.predict("scenes/test/room_3.ply")
    scene = read_scene("scenes/test/room_3.ply")
    points_P3, labels_P = scene.coords_P3 + scene.origin_3, room(3)[1]
    found = model.predict(torch.from_numpy(points_P3), {"color": torch.tensor(colors(labels_P))})
    assert np.array_equal(found.labels_P, expected.labels_P)
    np.testing.assert_allclose(found.probabilities_PK, expected.probabilities_PK, atol=1e-6)
    lost = points_P3.copy()
    lost[5, 1] = np.nan
    some = model.predict(lost, {"color": colors(labels_P) / 255})
    assert some.labels_P[5] == -100
    assert np.isnan(some.probabilities_PK[5]).all()
    assert (np.delete(some.labels_P, 5) == np.delete(found.labels_P, 5)).mean() > 0.97


@pytest.mark.parametrize(
    ("points", "features", "said"),
    [
        (np.zeros((4, 2)), {}, "points are not a scene"),
        (np.zeros((4, 3)), {}, "no color at each point"),
        (np.zeros((4, 3)), {"color": np.zeros((3, 3))}, "no color at each point"),
        ("scenes/nothing.ply", None, "does not exist"),
    ],
)
def test_what_is_no_scene_is_refused(model: SceneModel, points, features, said) -> None:
    with pytest.raises(DataError, match=said):
        model.predict(points, features)


def test_votes_are_the_mean_over_the_blocks_of_a_voxel(model: SceneModel) -> None:
    path = Path("scenes/test/room_4.ply")
    scene = model.preprocess.reader(path)
    coords_N3, feats_NC, rows_P = model.preprocess.voxels.voxelise(scene)
    parts = blocks(coords_N3[:, :2], most=60)
    assert len(parts) > 2
    sums = np.zeros((len(coords_N3), 3))
    for rows in parts:
        sites = torch.tensor(coords_N3[rows] - coords_N3[rows].min(0))
        x = SparseTensor(
            torch.tensor(feats_NC[rows]),
            torch.nn.functional.pad(sites, (1, 0)),
            spatial_shape=(64, 64, 64),
        )
        with torch.inference_mode():
            sums[rows] += model.module(x).feats.softmax(1).numpy()
    expected = (sums / sums.sum(1, keepdims=True))[rows_P]
    found = model.predict(path, block_voxels=60)
    np.testing.assert_allclose(found.probabilities_PK, expected, atol=1e-5)
    whole = model.predict(path)
    assert not np.allclose(whole.probabilities_PK, found.probabilities_PK, atol=1e-3)


@pytest.mark.parametrize("most", [1, 7, 50, 1000])
def test_blocks_cover_all_voxels_and_keep_columns_whole(most: int) -> None:
    rng = np.random.default_rng(0)
    for places in (rng.integers(30, size=(400, 2)), np.array([[3, 4]] * 20), np.zeros((1, 2), int)):
        found = blocks(places, most=most)
        assert {*np.concatenate(found).tolist()} == {*range(len(places))}
        for rows in found:
            columns = {*map(tuple, places[rows].tolist())}
            assert len(rows) <= most or len(columns) == 1
            inside = [n for n, each in enumerate(places.tolist()) if tuple(each) in columns]
            assert sorted(rows.tolist()) == inside


def test_flips_are_the_mean_over_mirror_images(model: SceneModel) -> None:
    points_P3, labels_P = room(7)
    points_P3 = points_P3.astype(np.float32)  # without another origin for each image
    images = [
        model.predict(points_P3 * np.float32([x, y, 1]), {"color": colors(labels_P)})
        for x in (1, -1)
        for y in (1, -1)
    ]
    expected = np.mean([each.probabilities_PK for each in images], axis=0)
    found = model.predict(points_P3, {"color": colors(labels_P)}, flips=True)
    np.testing.assert_allclose(found.probabilities_PK, expected, atol=1e-6)
