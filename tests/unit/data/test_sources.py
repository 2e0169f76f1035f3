"""Layouts that are read, and what is said about those that are not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.files import locked
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.shapes.generate import MODELLER_VERSION
from sparsepipe.data.sources import (
    CacheSettings,
    GeneratedShapes,
    NormalResampled,
    NpzBundle,
    OffTree,
)
from sparsepipe.errors import DataError


@pytest.fixture
def resampled(tmp_path: Path) -> Path:
    """Three classes, one with an underscore in its name, 100 points a shape."""
    root = tmp_path / "modelnet40_normal_resampled"
    rng = np.random.default_rng(5)
    classes = ("bowl", "night_stand", "vase")
    splits: dict[str, list[str]] = {"train": [], "test": []}
    for class_name in classes:
        (root / class_name).mkdir(parents=True)
        for number in range(1, 6):
            name = f"{class_name}_{number:04}"
            np.savetxt(
                root / class_name / f"{name}.txt",
                rng.uniform(-1, 1, (100, 6)),
                fmt="%.6f",
                delimiter=",",
            )
            splits["train" if number < 4 else "test"].append(name)
    (root / "modelnet40_shape_names.txt").write_text("\n".join(classes) + "\n")
    for split, names in splits.items():
        (root / f"modelnet40_{split}.txt").write_text("\n".join(names) + "\n")
    return root


def test_off_tree(make_tree: Callable[..., Path], settings: CacheSettings) -> None:
    root = make_tree(3, test_per_class=2)
    (root / "README.txt").write_text("as in the archive")
    (root / "__MACOSX").mkdir()
    source = OffTree(root)
    train, test = source.load("train", settings), source.load("test", settings)
    assert (len(train), len(test)) == (9, 6)
    assert train.classes == test.classes == ("ball", "box", "rod")
    assert train.names[4] == "box_0001"
    assert train.labels_S.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    cloud_N3 = train.cloud(4)
    assert cloud_N3.shape == (64, 3)
    # Points lie on the box: on each, some coordinate is at a face.
    low_3, high_3 = train.frames.low_S3[4], train.frames.high_S3[4]
    gap_N3 = np.minimum(np.abs(cloud_N3 - low_3), np.abs(cloud_N3 - high_3))
    assert gap_N3.min(axis=1).max() < 1e-4


def test_real_meshes(check_data: Path, settings: CacheSettings) -> None:
    points = OffTree(check_data / "modelnet10_off").load("train", settings)
    assert len(points) == 5
    assert points.classes == ("bathtub",)
    assert np.isfinite(points.frames.radius_S).all()
    with pytest.raises(DataError, match="no test files"):
        OffTree(check_data / "modelnet10_off").load("test", settings)


def test_resampled_text(resampled: Path, settings: CacheSettings) -> None:
    source = NormalResampled(resampled)
    train, test = source.load("train", settings), source.load("test", settings)
    assert (len(train), len(test)) == (9, 6)
    assert train.classes == ("bowl", "night_stand", "vase")
    assert train.names[3] == "night_stand_0001"
    table = np.loadtxt(resampled / "night_stand" / "night_stand_0001.txt", delimiter=",")
    points_N3 = table[:64, :3]
    middle_3 = (points_N3.min(axis=0) + points_N3.max(axis=0)) / 2
    np.testing.assert_allclose(train.cloud(3), points_N3 - middle_3, atol=2e-5)


@pytest.mark.parametrize("text", ["1,2\n" * 80, ""])
def test_broken_text_is_left_out(resampled: Path, settings: CacheSettings, text: str) -> None:
    (resampled / "bowl" / "bowl_0002.txt").write_text(text, encoding="latin-1")
    (resampled / "vase" / "vase_0001.txt").unlink()
    points = NormalResampled(resampled).load("train", settings)
    assert len(points) == 7
    assert not {"bowl_0002", "vase_0001"} & set(points.names)


def test_short_text_is_repeated(resampled: Path, settings: CacheSettings) -> None:
    path = resampled / "bowl" / "bowl_0002.txt"
    lines = path.read_text().splitlines()[:30]
    path.write_text("\n".join(lines) + "\n")
    points = NormalResampled(resampled).load("train", settings)
    assert points.counts_S is not None
    assert points.counts_S.tolist() == [100, 30, *[100] * 7]
    cloud_P3, table = points.cloud(1), np.loadtxt(lines, delimiter=",")[:, :3]
    middle_3 = (table.min(axis=0) + table.max(axis=0)) / 2
    np.testing.assert_allclose(cloud_P3, (table - middle_3)[np.arange(64) % 30], atol=2e-5)


def test_generated_shapes(tmp_path: Path, settings: CacheSettings) -> None:
    source = GeneratedShapes(
        tmp_path / "shapes", train_per_class=2, test_per_class=1, classes=["mug", "chair"]
    )
    train, test = source.load("train", settings), source.load("test", settings)
    assert (len(train), len(test)) == (4, 2)
    assert train.classes == ("chair", "mug")
    assert [path.name for path in (tmp_path / "shapes").iterdir()] == [
        f"v{MODELLER_VERSION}_train2_test1_seed0_chair+mug"
    ]
    larger = GeneratedShapes(
        tmp_path / "shapes", train_per_class=3, test_per_class=1, classes=["mug", "chair"]
    )
    assert len(larger.load("train", settings)) == 6
    assert len(source.load("train", settings)) == 4
    assert larger.fingerprint(settings) != source.fingerprint(settings)


def test_a_whole_set_of_shapes_needs_no_lock(
    tmp_path: Path, settings: CacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source() -> GeneratedShapes:
        return GeneratedShapes(tmp_path, train_per_class=1, test_per_class=1, classes=["mug"])

    folder = source().root
    monkeypatch.setattr("sparsepipe.data.sources.modelnet.LOCK_WAIT_S", 0.2)
    with locked(folder / ".lock", wait_s=1):
        with pytest.raises(DataError, match=r"longer than 0\.2 s"):
            source().load("train", settings)
        generate_shapes(folder, classes=["mug"], train_per_class=1, test_per_class=1, seed=0)
        assert len(source().load("train", settings)) == 1


@pytest.mark.parametrize("source", [OffTree, NpzBundle, NormalResampled])
def test_a_missing_root_and_another_layout_are_refused(
    source: type[OffTree], tmp_path: Path, settings: CacheSettings
) -> None:
    for root in (None, "/nowhere/at/all"):
        with pytest.raises(DataError, match=r"data\.root") as caught:
            source(root)
        assert "https://modelnet.cs.princeton.edu" in caught.value.remedy
    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        source(tmp_path).load("train", settings)
    assert caught.value.remedy


def test_an_empty_class_folder_is_refused_in_training_only(
    make_tree: Callable[..., Path], settings: CacheSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    root = make_tree(2)
    shutil.rmtree(root / "box" / "test")
    assert len(OffTree(root).load("test", settings)) == 4
    for path in (root / "box" / "train").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no train files of these classes: box"):
        OffTree(root).load("train", settings)


def test_no_usable_shape_is_refused(
    make_tree: Callable[..., Path], settings: CacheSettings
) -> None:
    root = make_tree(2)
    for path in (root / "box").rglob("*.off"):
        path.write_text("OFF\n3 1 0\n")
    with pytest.raises(DataError, match="only corrupt train files of these classes: box"):
        OffTree(root).load("train", settings)
    assert len(OffTree(root).load("test", settings)) == 4
    for path in root.rglob("*.off"):
        path.write_text("OFF\n3 1 0\n")
    with pytest.raises(DataError, match="only corrupt test files"):
        OffTree(root).load("test", settings)


def test_fingerprints_follow_content_not_place(
    make_tree: Callable[..., Path], bundle: Path, resampled: Path, settings: CacheSettings
) -> None:
    for source, root in (
        (OffTree, make_tree(1)),
        (NpzBundle, bundle),
        (NormalResampled, resampled),
    ):
        before = source(root).fingerprint(settings)  # type: ignore[attr-defined]
        copy = root.with_name(f"{root.name}-copy")
        shutil.copytree(root, copy)
        assert source(copy).fingerprint(settings) == before  # type: ignore[attr-defined]
        victim = next(
            path
            for path in sorted(copy.rglob("*"))
            if path.suffix in (".off", ".npz") or path.name.endswith("_0001.txt")
        )
        victim.write_bytes(victim.read_bytes() + b"\n")
        assert source(copy).fingerprint(settings) != before  # type: ignore[attr-defined]
