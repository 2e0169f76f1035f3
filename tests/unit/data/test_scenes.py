"""Scenes: voxels against a search point by point, splits, labels, crops, augmentation, cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.spatial.distance import pdist
from torch.nn.functional import cross_entropy

from sparsepipe.data import SceneAugment, SceneDataModule, SceneFolder
from sparsepipe.data.scenes import Scene, SceneReader, SceneVoxels
from sparsepipe.data.scenes.augment import crop, mixed
from sparsepipe.data.scenes.scene import class_counts
from sparsepipe.errors import ConfigError, DataError
from tests.support.command_line import composed

POINTS = 300


def scene_of(seed: int, points: int = POINTS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    coord = rng.uniform([0, 0, 5], [3, 3, 8], (points, 3)).astype(np.float32)
    color, label = rng.integers(0, 256, (points, 3), np.uint8), rng.integers(-1, 4, points)
    return {"coord": coord, "color": color, "label": label, "normal": coord / 9}


def write(root: Path, *names: str, **changed: Any) -> Path:
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        arrays = {**scene_of(seed), **changed}
        np.savez(root / name, **{key: each for key, each in arrays.items() if each is not None})
    return root


def opened(root: Path, *, pattern: str = "*", **settings: Any) -> SceneDataModule:
    source, cache = partial(SceneFolder, pattern=pattern), root.parent / "cache"
    data = SceneDataModule(root, source=source, cache_dir=cache, num_workers=0, **settings)
    data.setup()
    return data


def names_of(data: SceneDataModule, split: Any) -> list[str]:
    return [Path(file).name.removesuffix(".npz") for file in data.samples(split).files]


@pytest.mark.parametrize("reduce", ["mean", "first"])
def test_voxels_are_those_of_a_search_point_by_point(reduce: Any) -> None:
    given = scene_of(1)
    scene = Scene(given["coord"] - 7, features={"color": given["color"] / np.float32(255)})
    voxels = SceneVoxels(voxel_size=0.4, features=("color", "constant", "coord"), reduce=reduce)
    coords_N3, feats_NC, rows_P = voxels.voxelise(scene)
    low_3, high_3 = scene.coords_P3.min(0), scene.coords_P3.max(0)
    moved_P3 = scene.coords_P3 - [*(low_3 + high_3)[:2] / 2, low_3[2]]
    found: dict[tuple[int, ...], list[Any]] = {}
    for point, color, moved in zip(
        scene.coords_P3.astype(float), scene.features["color"], moved_P3, strict=True
    ):
        found.setdefault(tuple(np.floor(point / 0.4)), []).append([*color, 1, *moved])
    lowest = np.min([*found], axis=0)
    cells = sorted(found)
    np.testing.assert_array_equal(coords_N3, np.array(cells) - lowest)
    expected = [np.mean(found[c], axis=0) if reduce == "mean" else found[c][0] for c in cells]
    np.testing.assert_allclose(feats_NC, expected, atol=2e-6)
    assert feats_NC.shape[1] == voxels.in_channels == 7
    np.testing.assert_array_equal(
        coords_N3[rows_P] + lowest, np.floor(scene.coords_P3.astype(float) / 0.4)
    )


def test_parts_of_a_scene_keep_their_height_above_its_floor() -> None:
    scene = Scene(scene_of(2)["coord"])
    voxels = SceneVoxels(voxel_size=1e-3, features=("height",))
    upper = scene.coords_P3[:, 2] > 7
    _, feats_NC, rows_P = voxels.voxelise(voxels.prepare(scene).take(upper))
    floor = np.quantile(scene.coords_P3[:, 2], 0.01)
    np.testing.assert_allclose(feats_NC[rows_P, 0], scene.coords_P3[upper, 2] - floor, atol=1e-5)


def test_the_loss_of_counts_is_that_of_the_points() -> None:
    given, rng = scene_of(3), np.random.default_rng(0)
    scene = Scene(given["coord"], labels_P=given["label"])
    coords_N3, _, rows_P = SceneVoxels(voxel_size=0.8).voxelise(scene)
    counts_NK = class_counts(rows_P, scene.labels_P, num_voxels=len(coords_N3), num_classes=4)
    logits_NK = torch.from_numpy(rng.normal(size=counts_NK.shape))
    of_points = cross_entropy(logits_NK[rows_P], torch.from_numpy(given["label"]), ignore_index=-1)
    sums = (torch.from_numpy(counts_NK) * logits_NK.log_softmax(1)).sum()
    assert (-sums / counts_NK.sum()).item() == pytest.approx(of_points.item(), rel=1e-12)


AREAS = ("Area_1/a", "Area_1/b", "Area_2/c", "Area_3/d", "Area_3/e")
TABLE = "file,split\nArea_1/a.npz,train\nArea_1/b.npz,Test\nArea_2/c.npz,val\n"
LISTS = {"t.txt": "Area_1/a\nArea_1/b.npz\n", "s.json": '["data/of/Area_3"]', "split.csv": TABLE}
SPLITS: dict[str, tuple[Sequence[str], Any, str, str, str]] = {
    # scenes; data.split; names for training, validation and testing
    "folders": (("train/a", "train/b", "test/c"), None, "ab", "", "c"),
    "three folders": (("x/train/a", "x/val/b", "x/test/c"), None, "a", "b", "c"),
    "validation as test": (("train/a", "val/b"), None, "a", "", "b"),
    "the first folder counts": (("train/test/a", "test/train/b"), None, "a", "", "b"),
    "a folder for testing alone": (("x/a", "b", "x/test/c"), None, "ba", "", "c"),
    "names of folders": (AREAS, {"test": ["Area_3"]}, "abc", "", "de"),
    "names of all parts": (AREAS, {"train": ["Area_2", "b"], "test": ["d"]}, "bc", "", "d"),
    "patterns of names": (AREAS, {"test": ["*_3", "[bx]"]}, "ac", "", "bde"),
    "names in files": (AREAS, {"train": "t.txt", "test": "s.json"}, "ab", "", "de"),
    "a table": (AREAS, "split.csv", "a", "c", "b"),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_splits(kind: str, tmp_path: Path) -> None:
    scenes, split, train, val, test = SPLITS[kind]
    root = write(tmp_path / "root", *scenes)
    for name, text in LISTS.items():
        (root / name).write_text(text)
    data = opened(root, split=split, pattern="*.npz")
    assert names_of(data, "train") == [*train, *val]
    assert names_of(data, "test") == [*test]
    assert (data.num_train, data.num_val) == (len(train), len(val))


def test_groups_stay_together(tmp_path: Path) -> None:
    names = [f"house_{house}/room_{room}" for house in range(9) for room in range(1 + house % 3)]
    data = opened(
        write(tmp_path / "root", *names), split=0.3, group="house_[0-9]+", val_share=0.3, seed=4
    )
    houses = [{Path(file).parent.name for file in data.samples(s).files} for s in ("train", "test")]
    assert len(houses[0] | houses[1]) == 9
    assert len(houses[1]) == 3
    assert not houses[0] & houses[1]
    train = {data.samples("train").groups[index] for index in data._train_S}
    val = {data.samples("train").groups[index] for index in data._val_S}
    assert (len(train), len(val)) == (4, 2)
    assert not train & val


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"split": {"test": ["Area_9"]}}, "Area_9"),
        ({"split": {"test": ["Area_9/b"]}}, "Area_9/b"),
        ({"split": {"test": ["a"], "val": ["Area_1"]}}, "Area_1/a"),
        ({"split": {"tests": ["a"]}}, "tests"),
        ({"split": {"test": ["a"]}, "group": "Area_[0-9]"}, "cuts the group 'Area_1'"),
        ({"group": "area_[0-9]"}, "finds nothing"),
        ({"split": {"train": ["a", "b"], "test": "none.txt"}}, "none.txt"),
        ({"split": 1.5}, "1.5"),
        ({"features": ["color", "intensity"]}, "has no intensity"),
        ({"classes": ["a", "b", "c"]}, "labels of no class: 3"),
        ({"learning_map": {0: 0, 1: 1}}, "labels of no class: 2, 3"),
        ({"learning_map": "absent.yaml"}, "absent.yaml"),
        ({"learning_map": [[1, 3], [2, 3]]}, "label of two classes"),
        ({"learning_map": {0: 2}, "classes": ["a", "b"]}, "class 2"),
        ({"label": "class"}, "have no labels"),
        ({"voxel_size": 1e-7}, "root/Area_.* voxels of 1e-07 m"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_are_refused(settings: Any, what: str, tmp_path: Path) -> None:
    root = write(tmp_path / "root", *AREAS)
    with pytest.raises((ConfigError, DataError), match=what):
        next(iter(opened(root, **settings).test_dataloader()))


def test_folders_and_shares_exclude_each_other_and_a_test_needs_labels(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "train/a", "train/b")
    write(root, "test/c", label=None)
    with pytest.raises(ConfigError, match=r"folders in .* divide its scenes"):
        opened(root, split=0.2)
    with pytest.raises(ConfigError, match="no scene to test on has labels"):
        opened(root).test_dataloader()


@pytest.mark.parametrize("far", [np.float32(1e20), np.float64(-3.4e38), np.float64(1e300)])
def test_points_far_from_all_others_are_refused(far: Any) -> None:
    coord = scene_of(0)["coord"].astype(far.dtype)
    coord[7, 0] = far
    with pytest.raises(ValueError, match="which is no place"):
        SceneReader().scene_of({"coord": coord}, source="it")
    with pytest.raises(DataError, match="voxels"):
        SceneVoxels().voxelise(Scene(coord.clip(-1e12, 1e12).astype(np.float32)))


def test_a_broken_colour_is_refused_only_where_it_is_used() -> None:
    columns = {**scene_of(0), "color": np.full((POINTS, 3), np.nan)}
    found = SceneReader(features=["normal"]).scene_of(columns, source="it").scene
    assert "color" not in found.features
    with pytest.raises(ValueError, match="color is not finite"):
        SceneReader(features=["color"]).scene_of(columns, source="it")


@pytest.mark.parametrize(("kind", "top"), [("u1", 255), ("u2", 65535), ("u4", 1), ("f8", 1)])
def test_intensities_of_8_and_16_bits_become_shares(kind: str, top: int) -> None:
    columns = {"coord": scene_of(0)["coord"], "intensity": np.full(POINTS, 200, kind)}
    found = SceneReader().scene_of(columns, source="it").scene.features["intensity"]
    np.testing.assert_allclose(found, 200 / top, rtol=1e-6)


def test_labels_that_only_test_scenes_have_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "train/a")
    write(root, "test/b", label=np.full(POINTS, 9))
    with pytest.raises(DataError, match=r"test/b\.npz has labels of no class: 9"):
        opened(root)


@pytest.mark.parametrize("settings", [{"scale": [2, 1]}, {"elastic": [[1, 2, 3]]}])
def test_wrong_augmentation_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SceneAugment(**settings)


KITTI = {
    "labels": {0: "unlabeled", 10: "car", 11: "bicycle", 252: "moving-car"},
    "learning_map": {-1: 0, 0: 0, 1: 2, 2: 1, 3: 1},
    "learning_map_inv": {0: 0, 1: 10, 2: 11},
    "learning_ignore": {0: True, 1: False, 2: False},
}


@pytest.mark.parametrize(
    ("settings", "classes", "numbers"),
    [
        ({}, "0123", [-100, 0, 1, 2, 3]),
        ({"ignore": [0, 3]}, "012", [-100, -100, 1, 2, -100]),
        ({"classes": "wxyz", "ignore": 2}, "wxyz", [-100, 0, 1, -100, 3]),
        ({"learning_map": {0: -1, 1: 1, 2: 0, "3": 1}}, "01", [-100, -100, 1, 0, 1]),
        ({"learning_map": [[1, 3], 0], "ignore": 2}, "01", [-100, 1, 0, -100, 0]),
        ({"learning_map": [[1, 3], 0, 2], "ignore": [2]}, "012", [-100, 1, 0, -100, 0]),
        ({"learning_map": "map.yaml"}, ["car", "bicycle"], [-100, -100, 1, 0, 0]),
    ],
)
def test_class_numbers_of_labels(
    settings: Any, classes: Any, numbers: list[int], tmp_path: Path
) -> None:
    root = write(tmp_path / "root", *AREAS)
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(KITTI))
    if isinstance(settings.get("learning_map"), str):
        settings = {"learning_map": str(tmp_path / "map.yaml")}
    data = opened(root, **settings)
    assert data.classes == tuple(classes)
    files, given = data.samples("train").files, scene_of(0)["label"]
    (index,) = [n for n, file in enumerate(files) if file.endswith("Area_1/a.npz")]
    np.testing.assert_array_equal(
        data.samples("train").read(index).labels_P, np.array(numbers)[given + 1]
    )


def test_a_batch_counts_the_points_of_crops(tmp_path: Path) -> None:
    root = write(tmp_path / "root", *[f"train/{n}" for n in range(5)], "test/5")
    settings = {"features": ["color", "normal"], "voxel_size": 0.5, "batch_size": 2, "seed": 3}
    whole = next(iter(opened(root, **settings).test_dataloader()))
    given = scene_of(5)
    assert whole["index"].tolist() == [0]
    assert whole["input"].feats.shape[1] == 6
    assert whole["input"].spatial_shape == (64, 64, 64)
    expected = np.bincount(given["label"][given["label"] >= 0], minlength=4)
    assert whole["label"].feats.sum(0).tolist() == expected.tolist()
    data = opened(root, crop_points=40, crop_size=2.0, crops_per_scene=3, **settings)
    batches = [list(data.train_dataloader()) for _ in range(2)]
    assert sum(len(batch["index"]) for batch in batches[0]) == 15
    for batch, again in zip(*batches, strict=True):
        x, label = batch["input"], batch["label"]
        assert torch.equal(x.coords, label.coords)
        assert (label.feats.sum(1) <= 40).all()
        extents = x.coords[:, 1:].amax(0) - x.coords[:, 1:].amin(0)
        assert (extents[:2] <= 4).all()  # in voxels of 0.5 m
        assert torch.equal(x.feats, again["input"].feats)


def test_a_crop_has_the_nearest_points() -> None:
    scene = Scene(scene_of(0, 2000)["coord"], labels_P=np.arange(2000))
    part = crop(scene, np.random.default_rng(1), up_axis="z", points=50, size=None)
    rows = part.labels_P
    assert rows is not None
    middles_PP = np.linalg.norm(scene.coords_P3[:, None] - scene.coords_P3[None], axis=2)
    nearest = [{*np.argsort(row)[:50]} for row in middles_PP]
    assert {*rows} in nearest
    assert (np.diff(rows) > 0).all()


def varied(scene: Scene, **settings: Any) -> Scene:
    return SceneAugment(**settings)(scene, np.random.default_rng(2), up_axis="z")


def test_augmentation_moves_scenes_as_a_whole() -> None:
    given = scene_of(0)
    normals = given["normal"] / np.linalg.norm(given["normal"], axis=1, keepdims=True)
    color = given["color"] / np.float32(255)
    scene = Scene(given["coord"], features={"normal": normals, "color": color})
    same = varied(scene)
    np.testing.assert_allclose(pdist(same.coords_P3), pdist(scene.coords_P3), atol=1e-5)
    turned = varied(scene, rotate_deg=180, flip=1.0, scale=[1.5, 1.5])
    np.testing.assert_allclose(pdist(turned.coords_P3), 1.5 * pdist(scene.coords_P3), rtol=1e-4)
    assert np.abs(turned.coords_P3[:, :2] - same.coords_P3[:, :2]).max() > 0.5
    np.testing.assert_allclose(turned.coords_P3[:, 2], 1.5 * same.coords_P3[:, 2], atol=1e-5)
    # The angles of normals with the lines between points stay as they were.
    before, after = (
        (each.features["normal"][1:] * np.diff(each.coords_P3, axis=0)).sum(1)
        for each in (scene, turned)
    )
    np.testing.assert_allclose(after, 1.5 * before, atol=1e-5)
    np.testing.assert_allclose(turned.features["color"], color)
    jittered = varied(scene, jitter=0.1, jitter_clip=0.02)
    np.testing.assert_allclose(jittered.coords_P3, same.coords_P3, atol=0.0201)
    bent = varied(scene, elastic=[[1.0, 2.0]]).coords_P3 - same.coords_P3
    assert 0.02 < np.abs(bent).max() < 2
    near = pdist(scene.coords_P3) < 0.2
    assert pdist(bent)[near].max() < 0.5 * pdist(bent).max()  # neighbours move alike


@pytest.mark.parametrize(
    "settings",
    [{"color_contrast": 1.0}, {"color_shift": 0.5}, {"color_jitter": 0.3}, {"color_drop": 1.0}],
)
def test_augmented_colours_stay_colours(settings: Any) -> None:
    color = scene_of(0)["color"] / np.float32(510)
    scene = Scene(scene_of(0)["coord"], features={"color": color})
    found = varied(scene, **settings).features["color"]
    assert found.dtype == np.float32
    assert 0 <= found.min() <= found.max() <= 1
    assert np.abs(found - color).max() > 0.1
    np.testing.assert_array_equal(scene.features["color"], color)


def test_mixed_scenes_have_the_points_of_both(tmp_path: Path) -> None:
    one, two = (
        Scene(given["coord"], features={"normal": given["normal"]}, labels_P=given["label"])
        for given in (scene_of(0), scene_of(1))
    )
    both = mixed(one, two)
    np.testing.assert_array_equal(both.coords_P3, np.vstack([one.coords_P3, two.coords_P3]))
    np.testing.assert_array_equal(both.labels_P, np.hstack([one.labels_P, two.labels_P]))
    root = write(tmp_path / "root", *[f"train/{n}" for n in range(3)], "test/3", label=np.ones(300))
    data = opened(root, augment=SceneAugment(mix=1.0, dropout=0.0), batch_size=3)
    (batch,) = data.train_dataloader()
    assert batch["label"].feats.sum().item() == 2 * 3 * POINTS


def test_scenes_are_parsed_once_and_broken_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "root", *AREAS)
    broken = [root / "Area_1" / "b.npz", root / "Area_3" / "d.npz"]
    for path in broken:
        path.write_bytes(b"junk")
    with pytest.raises(DataError) as caught:
        opened(root, split={"test": ["Area_2"]})
    assert all(str(path) in caught.value.message for path in broken)
    for path in broken:
        np.savez(path, **scene_of(7))
    parsed = list[Path]()
    parse = SceneReader.parse
    monkeypatch.setattr(
        SceneReader, "parse", lambda self, path: (parsed.append(path), parse(self, path))[1]
    )
    first = opened(root, split={"test": ["Area_2"]})
    assert {*parsed} == {*broken, root / "Area_2" / "c.npz"}  # the others were in the cache
    second = opened(root, split={"test": ["Area_2"]}, learning_map=dict.fromkeys(range(-1, 4), 0))
    assert len(parsed) == 3
    assert second.num_classes == 1
    assert first.fingerprint() != second.fingerprint()


def test_the_channels_of_a_network_follow_the_features() -> None:
    given = ("data=scenes", "data.root=.", "data.features=[Color,height]", "model=sparse_resnet18")
    assert composed(*given).model.get("in_channels") == 4
    assert composed("data=shapes", "model=sparse_resnet18").model.get("in_channels") == 1
