"""Bundles of points in two npz files."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from sparsepipe.data.shape_files import read_shape
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
        ({"labels": np.zeros(3)}, "12 shapes, but labels"),
        ({"labels": np.full(12, 7)}, "labels up to 7 for 3 classes"),
        ({"points": np.zeros((12, 5))}, "not \\[shapes, points, 3\\]"),
        (
            {"points": np.full((12, 5, 3), np.nan)},
            r"12 shapes of .*train\.npz have points that are not finite",
        ),
        ({"points": np.full((12, 5, 3), None)}, "object"),
        ({"points": np.full((12, 5, 3), "x")}, "not numbers"),
        ({"labels": np.zeros(12)}, "labels are not integers"),
        ({"labels": np.full(12, None)}, "array labels holds Python objects"),
        ({"scale": np.ones(3)}, "not a positive number"),
        ({"scale": np.float32(0)}, "not a positive number"),
        ({"offset": np.ones(2)}, r"offset is of shape \(2,\), not \[3\] or \[12, 3\]"),
        ({"offset": np.array([0, np.inf, 0])}, "offset is not finite"),
        ({"offset": np.array(["a", "b", "c"])}, "offset is not of numbers"),
        ({"names": np.array(["one"])}, r"12 shapes, but names of shape \(1,\)"),
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


def test_a_truncated_bundle_is_refused(bundle: Path, settings: CacheSettings) -> None:
    content = (bundle / "train.npz").read_bytes()
    (bundle / "train.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"train\.npz is not an npz bundle"):
        NpzBundle(bundle).load("train", settings)


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    written = io.BytesIO()
    npy.write_array_header_1_0(written, {"descr": descr, "fortran_order": False, "shape": shape})
    return written.getvalue()


def archive(
    points: bytes, zeros: int = 0, method: int = zipfile.ZIP_DEFLATED
) -> Callable[[Path], None]:
    """Writes the member ``points.npy``, followed by zeros, beside valid labels."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", method) as file:
            for name, values in (("labels", np.zeros(1, np.int64)), ("classes", np.array(["a"]))):
                with file.open(f"{name}.npy", "w") as member:
                    np.save(member, values)
            with file.open("points.npy", "w", force_zip64=True) as member:
                member.write(points)
                for _ in range(zeros >> 20):
                    member.write(bytes(1 << 20))

    return write


def patched(marker: bytes, offset: int, value: bytes) -> Callable[[Path], None]:
    """Changes bytes at a distance from the last marker, in the archive's table of contents."""

    def write(path: Path) -> None:
        archive(header((1, 2, 3)) + bytes(24))(path)
        raw = bytearray(path.read_bytes())
        at = raw.rindex(marker) + offset
        raw[at : at + len(value)] = value
        path.write_bytes(raw)

    return write


def plain(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.zeros((1, 2, 3)))
    path.with_suffix(".npy").rename(path)


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "1e12 rows": (archive(header((10**12, 2, 3))), r"promises the shape \(1000000000000, 2, 3\)"),
    "empty rows": (archive(header((10**12, 0, 3))), "."),
    "negative": (archive(header((-1, -2, 3))), "promises the shape"),
    "zeros": (archive(header((1, 17 << 18, 4)), 17 << 22), "would unpack from 0.1 MiB to 68.0 MiB"),
    "objects": (archive(header((1, 2, 3), "|O")), "array points holds Python objects"),
    "encrypted": (patched(b"PK\1\2", 8, b"\1"), "array points is encrypted"),
    "unknown compression": (patched(b"PK\1\2", 10, b"\x63"), "method of the number 99"),
    "size of the member": (patched(b"PK\1\2", 20, b"\0\0\0\x7f"), "the end of its array points"),
    "place of the member": (patched(b"PK\1\2", 42, b"\0\0\0\x7f"), "."),
    "a plain npy": (plain, "it is a single array, of np.save"),
    "no numpy": (archive(b"not numpy"), "magic string"),
    "columns with names": (archive(b"\x93NUMPY\3\0" + bytes(99)), "columns with names"),
    "nested header": (archive(b"\x93NUMPY\1\0\x10\x27" + b"(" * 10_000), "."),
    "a pipe": (os.mkfifo, "is a pipe, not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIES)
def test_archives_that_lie(tmp_path: Path, settings: CacheSettings, kind: str) -> None:
    """As a bundle and as a file of one shape: quickly, and without the memory that they promise."""
    write, message = LIES[kind]
    for split in ("train", "test"):
        write(tmp_path / f"{split}.npz")
    with pytest.raises(DataError, match=message) as caught:
        NpzBundle(tmp_path).load("train", settings)
    assert str(tmp_path / "train.npz") in caught.value.message
    with pytest.raises(DataError, match=message) as caught:
        read_shape(tmp_path / "train.npz")
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
