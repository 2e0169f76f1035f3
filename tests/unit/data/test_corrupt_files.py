"""Corrupt files are listed and left out, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.row_cache import CORRUPT
from sparsepipe.data.sources import CacheSettings, OffTree
from sparsepipe.errors import DataError
from tests.support.data_helpers import (
    POINTS,
    build,
    cache_of,
)


def corrupt_some(root: Path) -> None:
    (root / "box" / "train" / "box_0001.off").write_text("OFF\n8 12 0\n0 0 0\n")
    (root / "rod" / "train" / "rod_0002.off").write_text(
        "OFF\n3 1 0\n" + "nan 0 0\n" * 3 + "3 0 1 2\n"
    )


def test_corrupt_files_are_listed_and_left_out(
    make_tree: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    points = OffTree(root).load("train", settings)
    assert len(points) == 10
    assert not {"box_0001", "rod_0002"} & set(points.names)
    by_class = [points.classes[label] for label in points.labels_S]
    assert by_class == [name.split("_")[0] for name in points.names]
    assert "2 of 12 train files are corrupt" in caplog.text
    listed = json.loads(next((tmp_path / "c").rglob("corrupt.json")).read_text())
    assert set(listed) == {"box/train/box_0001.off", "rod/train/rod_0002.off"}
    # The clouds that remain are those of their own files.
    clean = build(cache_of(root, tmp_path / "c"))
    assert (clean.state_S() == CORRUPT).sum() == 2
    for index, name in enumerate(points.names):
        path = root / name.split("_")[0] / "train" / f"{name}.off"
        low_3 = np.loadtxt(path, skiprows=2, max_rows=int(path.read_text().split()[1])).min(axis=0)
        np.testing.assert_allclose(points.cloud(index).min(axis=0), low_3, atol=0.4)
        np.testing.assert_allclose(points.frames.low_S3[index], low_3, atol=1e-5)


def test_only_the_process_that_builds_names_the_corrupt_files(
    make_tree: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    caplog.set_level("INFO")
    for expected, again in ((["WARNING"], 0), ([], 1), ([], 0)):
        caplog.clear()
        OffTree(root).load("train", settings)
        loud = [record.levelname for record in caplog.records if record.levelno > 20]
        assert loud == expected
        assert caplog.text.count("2 of 12 train files are corrupt and left out, as before") == again


def test_strict_refuses_corrupt_files_and_names_them(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1, strict=True)
    for _ in range(2):  # also when the cache stands already
        with pytest.raises(DataError, match=r"(?s)box_0001\.off.*rod_0002\.off") as caught:
            OffTree(root).load("train", settings)
        assert "data.strict=false" in caught.value.remedy


def test_a_file_that_comes_back_is_no_longer_corrupt(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    path = root / "box" / "train" / "box_0001.off"
    text = path.read_text()
    path.write_text("OFF\n8 12 0\n0 0 0\n")
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    assert len(OffTree(root).load("train", settings)) == 8
    path.write_text(text)
    assert len(OffTree(root).load("train", settings)) == 9
