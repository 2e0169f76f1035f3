"""Bundles of points in two npz files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.sources import CacheSettings, NpzBundle
from sparsepipe.errors import DataError


def test_npz_bundle(bundle: Path, settings: CacheSettings) -> None:
    source = NpzBundle(bundle)
    for split, count in (("train", 12), ("test", 7)):
        points = source.load(split, settings)  # type: ignore[arg-type]
        assert len(points) == count
        assert points.names[2] == "thing_2"
        with np.load(bundle / f"{split}.npz") as stored:
            expected = stored["points"].astype(np.float64) * float(stored["scale"])
        for index in range(count):
            np.testing.assert_allclose(points.cloud(index), expected[index], atol=1e-6)
        np.testing.assert_allclose(points.frames.low_S3, expected.min(axis=1), atol=1e-6)
        np.testing.assert_allclose(points.frames.high_S3, expected.max(axis=1), atol=1e-6)
        centers = expected.mean(axis=1)
        np.testing.assert_allclose(points.frames.center_S3, centers, atol=1e-6)
        radii = np.linalg.norm(expected - centers[:, None], axis=2).max(axis=1)
        np.testing.assert_allclose(points.frames.radius_S, radii, rtol=1e-6)


def test_npz_points_are_mapped_and_unpacked_once(bundle: Path, settings: CacheSettings) -> None:
    NpzBundle(bundle).load("train", settings)
    unpacked = next(settings.directory.rglob("points.npy"))
    time_ns = unpacked.stat().st_mtime_ns
    points = NpzBundle(bundle).load("train", settings)
    assert points.points.path.stat().st_mtime_ns == time_ns
    assert isinstance(points.points.array.base, np.memmap)


@pytest.mark.full
def test_real_bundle_fills_the_known_number_of_voxels(
    check_data: Path, settings: CacheSettings
) -> None:
    from sparsepipe.data import ShapeDataModule

    for resolution, mean in ((32, 636), (50, 823)):
        data = ShapeDataModule(
            check_data / "modelnet40_1024",
            source=NpzBundle,
            cache_dir=settings.directory,
            resolution=resolution,
            span="sphere",
            num_points=None,
        )
        data.setup()
        shapes = data.test_dataloader().dataset
        counts = [len(shapes[0, index]["coords"]) for index in range(len(shapes))]  # type: ignore[arg-type]
        assert len(counts) == 2468
        assert np.mean(counts) == pytest.approx(mean, abs=0.6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": None}, "lacks labels"),
        ({"labels": np.zeros(12)}, "labels are not 12 whole numbers"),
        ({"labels": np.full(12, 7)}, "from 7 to 7, not from 0 to 2"),
        ({"points": np.zeros((12, 5))}, r"numbers \[shapes, points, 3\]"),
        ({"points": np.full((12, 5, 3), np.nan)}, "points of shape 0 .* are not finite"),
        ({"points": np.full((12, 5, 3), "x")}, "are not numbers"),
        ({"scale": np.float32(0)}, "not a positive number"),
        ({"offset": np.array([0, np.inf, 0])}, "offset is not finite"),
        ({"names": np.array(["one"])}, r"shape \(1,\), not \(12,\)"),
    ],
)
def test_bundles_whose_arrays_do_not_fit(
    bundle: Path, settings: CacheSettings, change: dict[str, np.ndarray | None], said: str
) -> None:
    with np.load(bundle / "train.npz") as stored:
        arrays = {**stored, **change}
    np.savez(
        bundle / "train.npz", **{name: array for name, array in arrays.items() if array is not None}
    )
    with pytest.raises(DataError, match=said):
        NpzBundle(bundle).load("train", settings)


def test_a_bundle_with_broken_bytes_is_refused(bundle: Path, settings: CacheSettings) -> None:
    path = bundle / "train.npz"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.npz is not an npz bundle"):
        NpzBundle(bundle).load("train", settings)
    assert not list(settings.directory.rglob("points.npy"))


def test_a_bundle_is_read_whole_once(
    bundle: Path, settings: CacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = NpzBundle(bundle).fingerprint(settings)
    NpzBundle(bundle).load("train", settings)

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr("sparsepipe.data.files.digest_file", refuse)
    assert NpzBundle(bundle).fingerprint(settings) == before
    NpzBundle(bundle).load("train", settings)


def plain(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.zeros((1, 2, 3)))
    path.with_suffix(".npy").rename(path)


@pytest.mark.parametrize("write", [plain, os.mkfifo, lambda path: path.write_bytes(b"PK")])
def test_files_that_are_no_archive_are_refused_before_they_are_digested(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.npz")
    with pytest.raises(DataError) as caught:
        NpzBundle(tmp_path)
    assert str(tmp_path / "train.npz") in caught.value.message


def test_lists_may_be_columns(bundle: Path, settings: CacheSettings) -> None:
    expected = NpzBundle(bundle).load("train", settings)
    with np.load(bundle / "train.npz") as stored:
        arrays = dict(stored)
    for name in ("labels", "names", "classes"):
        arrays[name] = arrays[name][:, None]
    np.savez(bundle / "train.npz", **arrays, others=np.zeros((3, 3), object))
    found = NpzBundle(bundle).load("train", settings)
    assert found.labels_S.tolist() == expected.labels_S.tolist()
    assert (found.names, found.classes) == (expected.names, expected.classes)
