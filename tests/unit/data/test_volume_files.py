"""The user's own volumes: formats, layouts, and what is wrong with them."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsepipe.data import VolumeDataModule, VolumeFiles
from sparsepipe.data.volumes.formats import read_volume
from sparsepipe.errors import ConfigError, DataError

SIZES = (6, 5, 8)
PART = (slice(2, 5), slice(0, 5), slice(4, 8))
Write = Callable[[Path, np.ndarray], None]


def write_npy(path: Path, values: np.ndarray) -> None:
    np.save(path, values)


def write_tif(path: Path, values: np.ndarray, **settings: Any) -> None:
    pytest.importorskip("tifffile").imwrite(path, values, photometric="minisblack", **settings)


def write_nifti(
    path: Path, values: np.ndarray, *, slope: float | None = None, affine: Any = ()
) -> None:
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(values, affine if len(affine) else np.eye(4))
    if slope is not None:
        image.header.set_slope_inter(slope, 1)
        image = nibabel.Nifti1Image(values * slope + 1, np.eye(4), image.header)
        image.header.set_data_dtype(values.dtype)
    nibabel.save(image, path)


def write_itk(path: Path, values: np.ndarray) -> None:
    sitk = pytest.importorskip("SimpleITK")
    sitk.WriteImage(sitk.GetImageFromArray(np.ascontiguousarray(values.T)), str(path))


def write_zarr(path: Path, values: np.ndarray, *, version: int = 3) -> None:
    zarr = pytest.importorskip("zarr")
    chunks = tuple(max(1, size // 2) for size in values.shape)
    array = zarr.create_array(
        path,
        shape=values.shape,
        dtype=values.dtype,
        chunks=chunks,
        zarr_format=version,
        overwrite=True,
    )
    array[:] = values


def write_h5(path: Path, values: np.ndarray, arrays: int = 1) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        for number in range(arrays):
            file.create_dataset(f"values {number}", data=values, chunks=True, compression="gzip")


FORMATS: dict[str, tuple[str, Write]] = {
    "npy": ("npy", write_npy),
    "tif": ("tif", write_tif),
    "big-endian tif": ("tif", functools.partial(write_tif, byteorder=">")),
    "tif of single pages": ("tiff", functools.partial(write_tif, metadata=None, contiguous=False)),
    "compressed tif": ("tif", functools.partial(write_tif, compression="zlib")),
    "nii": ("nii", write_nifti),
    "nii.gz": ("nii.gz", write_nifti),
    "scaled nii.gz": ("nii.gz", functools.partial(write_nifti, slope=0.5)),
    "nrrd": ("nrrd", write_itk),
    "mha": ("mha", write_itk),
    "h5": ("h5", write_h5),
    "zarr": ("zarr", write_zarr),
    "zarr 2": ("zarr", functools.partial(write_zarr, version=2)),
}
IN_PARTS = {"npy", "h5", "zarr", "zarr 2"}


def volume(number: int, sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1000, sizes).astype(np.int16)


def write_pairs(root: Path, suffix: str = "npy", write: Write = write_npy) -> None:
    """Three volumes for training and two for testing, with labels 0 to 2 of voxels."""
    for split, count in (("train", 3), ("test", 2)):
        for kind in ("inputs", "labels"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            values = volume(number)
            write(root / "inputs" / split / f"v{number}.{suffix}", values)
            np.save(root / "labels" / split / f"v{number}.npy", (values % 3).astype(np.uint8))


def opened(root: Path, cache: Path, *, labels: str = "voxel", **settings: Any) -> VolumeDataModule:
    if labels == "voxel":
        settings = {"classes": ["none", "some", "much"], **settings}
    data = VolumeDataModule(
        root,
        source=functools.partial(VolumeFiles, **settings),
        cache_dir=cache,
        labels=labels,  # type: ignore[arg-type]
        num_workers=0,
    )
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_each_format(tmp_path: Path, name: str) -> None:
    suffix, write = FORMATS[name]
    write_pairs(tmp_path / "root", suffix, write)
    data = opened(tmp_path / "root", tmp_path / "cache")
    assert any(tmp_path.glob("cache/volumes/*/*.npy")) == (name not in IN_PARTS)
    assert data.sample_sizes == SIZES
    assert data.classes == ("none", "some", "much")
    dataset = data.train_dataloader().dataset
    scale, shift = (0.5, 1) if name.startswith("scaled") else (1, 0)
    for part in (tuple(map(slice, SIZES)), PART, (slice(3, 3), *PART[1:])):
        dataset.read_part(part)
        for number in range(3):
            sample = pickle.loads(pickle.dumps(dataset))[0, number]  # as a worker gets it
            wanted = volume(number)[part]
            assert sample["input"].dtype == np.float32
            # Scaled values are rounded to the integers that the file stores.
            rounding = 0.02 if name.startswith("scaled") else 0
            assert np.allclose(sample["input"][0], wanted * scale + shift, rtol=0, atol=rounding)
            assert np.array_equal(sample["label"], wanted % 3)
    batch = next(iter(data.test_dataloader()))
    assert batch["input"].shape == (2, 1, *SIZES)
    assert batch["label"].dtype == torch.int64


def test_what_is_decompressed_is_kept(tmp_path: Path) -> None:
    write_pairs(tmp_path / "root", "nii.gz", write_nifti)
    first = opened(tmp_path / "root", tmp_path / "cache")
    (tmp_path / "root").rename(tmp_path / "moved")
    kept = [*tmp_path.glob("cache/volumes/*/*.npy")]
    times_ns = [path.stat().st_mtime_ns for path in kept]
    again = opened(tmp_path / "moved", tmp_path / "cache")
    assert times_ns == [path.stat().st_mtime_ns for path in kept]
    before = again.fingerprint()
    assert before == opened(tmp_path / "moved", tmp_path / "other").fingerprint()
    assert first.samples("train").inputs == again.samples("train").inputs
    # Another file of the same name is another volume.
    write_nifti(tmp_path / "moved" / "inputs" / "train" / "v0.nii.gz", volume(7))
    changed = opened(tmp_path / "moved", tmp_path / "cache")
    assert changed.fingerprint() != before
    assert np.array_equal(changed.train_dataloader().dataset[0, 0]["input"][0], volume(7))


@pytest.mark.parametrize("write", [write_npy, write_zarr])
def test_fingerprints_follow_contents_not_places(tmp_path: Path, write: Write) -> None:
    suffix = "zarr" if write is write_zarr else "npy"
    for name in ("one", "two"):
        write_pairs(tmp_path / name, suffix, write)
    one, two = (opened(tmp_path / name, tmp_path / "cache") for name in ("one", "two"))
    assert one.fingerprint() == two.fingerprint()
    np.save(tmp_path / "two" / "labels" / "test" / "v1.npy", np.zeros(SIZES, np.uint8))
    assert opened(tmp_path / "two", tmp_path / "cache").fingerprint() != one.fingerprint()


def test_folders_of_classes(tmp_path: Path) -> None:
    for number, name in enumerate(("round", "square")):
        for split in ("train", "test"):
            (tmp_path / name / split).mkdir(parents=True)
            np.save(tmp_path / name / split / "a.npy", volume(number))
    data = opened(tmp_path, tmp_path / "cache", labels="sample", mean=500.0, std=250.0)
    assert data.classes == ("round", "square")
    assert data.samples("train").labels_S.tolist() == [0, 1]
    sample = data.train_dataloader().dataset[0, 1]
    assert np.allclose(sample["input"][0], (volume(1) - 500.0) / 250, atol=1e-6)
    assert sample["label"] == 1
    chosen = opened(tmp_path, tmp_path / "cache", labels="sample", classes=["square"])
    assert chosen.samples("test").labels_S.tolist() == [0]
    with pytest.raises(DataError, match="names oval, for which"):
        opened(tmp_path, tmp_path / "cache", labels="sample", classes=["oval"])


@pytest.mark.parametrize(("axis", "place"), [("first", 0), ("last", -1)])
@pytest.mark.parametrize("sizes", [(6,), (6, 5), SIZES], ids=len)
def test_channels(tmp_path: Path, axis: str, place: int, sizes: tuple[int, ...]) -> None:
    (tmp_path / "only").mkdir()
    values = volume(1, (3, *sizes))
    for name in "ab":  # a share of which is for testing
        np.save(tmp_path / "only" / f"{name}.npy", np.moveaxis(values, 0, place))
    data = opened(tmp_path, tmp_path / "cache", labels="sample", channel_axis=axis)
    assert data.sample_sizes == sizes
    dataset = data.train_dataloader().dataset
    dataset.read_part(part := tuple(slice(1, size - 1) for size in sizes))
    assert np.array_equal(dataset[0, 0]["input"], values[(slice(None), *part)])


def write_csv(root: Path, text: str) -> Path:
    for number in range(4):
        np.save(root / f"{number}.npy", volume(number))
        np.save(root / f"{number}_labels.npy", volume(number) % 3)
    (root / "volumes.csv").write_text(text)
    return root / "volumes.csv"


def test_csv_files(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path, "split,label,input\ntrain,10,0.npy\ntest,2,1.npy\ntrain,2,2.npy\n,10,3.npy\n"
    )
    data = opened(path, tmp_path / "cache", labels="sample")
    assert data.classes == ("2", "10")
    assert data.samples("train").labels_S.tolist() == [1, 0, 1]
    assert data.samples("test").labels_S.tolist() == [0]
    absolute = tmp_path / "2_labels.npy"
    path = write_csv(tmp_path, f"input, label\n1.npy, 1_labels.npy\n2.npy, {absolute}\n")
    data = opened(path, tmp_path / "cache")
    assert np.array_equal(data.train_dataloader().dataset[0, 1]["label"], volume(2) % 3)
    with pytest.raises(ConfigError, match="no samples to test on"):
        data.test_dataloader()


def test_arrays_in_groups_are_named_by_their_paths(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "scan.zarr", mode="w")
    group.create_array("raw", data=volume(0))
    group.create_array("labels", data=volume(0) % 3)
    path = write_csv(tmp_path, "input,label\nscan.zarr/raw,scan.zarr/labels\n")
    data = opened(path, tmp_path / "cache")
    assert np.array_equal(data.train_dataloader().dataset[0, 0]["input"][0], volume(0))
    with pytest.raises(DataError, match=r"it is a group: .* \(labels, raw\)"):
        opened(write_csv(tmp_path, "input,label\nscan.zarr,0.npy\n"), tmp_path / "cache")


def test_a_corrected_spacing_of_a_group_is_read(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    found = []
    for scale in (1.0, 2.0):
        axes = [{"name": name, "type": "space", "unit": "millimeter"} for name in "zyx"]
        change = [{"type": "scale", "scale": [scale] * 3}]
        levels = [{"path": "raw", "coordinateTransformations": change}]
        attributes = {"multiscales": [{"axes": axes, "datasets": levels}]}
        group = zarr.open_group(tmp_path / "scan.zarr", mode="w", attributes=attributes)
        group.create_array("raw", data=volume(0))
        path = write_csv(tmp_path, "input,label\nscan.zarr/raw,0_labels.npy\n")
        data = opened(path, tmp_path / "cache", spacing=[1, 1, 1])
        sample = data.train_dataloader().dataset[0, 0]
        wanted = tuple(int(scale * size) for size in SIZES)
        assert sample["input"].shape[1:] == sample["label"].shape == wanted
        found.append(data.fingerprint())
    assert found[0] != found[1]


def test_suffixes_may_be_in_upper_case(tmp_path: Path) -> None:
    for name, part in (("A_T1.NII.GZ", 0), ("A_T2.NII.GZ", 1)):
        write_nifti(tmp_path / "plain.nii.gz", volume(part))
        (tmp_path / "plain.nii.gz").rename(tmp_path / name)
    path = write_csv(tmp_path, "input,label\nA_T1.NII.GZ,0_labels.npy\n")
    data = opened(path, tmp_path / "cache", channels=["_T1", "_T2"])
    found = data.train_dataloader().dataset[0, 0]["input"]
    assert np.array_equal(found, [volume(0), volume(1)])


def replaced(name: str, values: Any) -> Callable[[Path], None]:
    return lambda root: np.save(root / name, values, allow_pickle=True)


def cut(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name / "zarr.json" if name.endswith("zarr") else root / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])

    return damage


V1, L1 = "inputs/train/v1.npy", "labels/train/v1.npy"


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        ("npy", lambda root: (root / V1).unlink(), "no input: train/v1"),
        *(
            ("npy", lambda root, kind=kind: write_h5(root / kind / "train/v1.h5", volume(1)), "two")
            for kind in ("inputs", "labels")
        ),
        ("npy", replaced(L1, np.zeros((6, 5, 7), np.uint8)), r"\[6, 5, 7\]"),
        ("npy", replaced("inputs/train/v0.npy", np.zeros((*SIZES, 2))), "spatial dimensions: 4"),
        ("npy", replaced(V1, np.zeros(SIZES, np.complex64)), "values of type complex64"),
        (
            "npy",
            replaced(L1, np.full(SIZES, 3)),
            "from 3 to 3, .* whole numbers from 0 to 2",
        ),
        ("npy", replaced(L1, np.full(SIZES, -1)), "labels from -1 to -1"),
        ("npy", replaced(L1, np.full(SIZES, 0.5)), "labels/train/v1.npy has labels from 0.5"),
        ("h5", lambda root: write_h5(root / "inputs/train/v0.h5", volume(0), 2), "has 2 arrays"),
        *((each, cut(f"inputs/train/v1.{each}"), f"v1.{each} ") for each in ("npy", "h5", "zarr")),
        *(
            (e, cut(f"inputs/train/v1.{e}"), f"v1.{e} ")
            for e in ("tif", "nii", "nii.gz", "nrrd", "mha")
        ),
        ("tif of single pages", cut("inputs/train/v0.tiff"), "v0.tiff .* it is cut off"),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, suffix: str, damage: Callable[[Path], None], message: str
) -> None:
    write_pairs(tmp_path / "root", *FORMATS[suffix])
    damage(tmp_path / "root")
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / "root", tmp_path / "cache").train_dataloader().dataset[0, 1]
    assert caught.value.remedy
    assert not list((tmp_path / "cache").glob("**/*.tmp"))


@pytest.mark.parametrize(
    ("suffix", "package"),
    [
        ("tif", "tifffile"),
        ("nii.gz", "nibabel"),
        ("mha", "SimpleITK"),
        ("zarr", "zarr"),
        ("h5", "h5py"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, suffix: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs(tmp_path, suffix, lambda path, values: path.write_bytes(b"x"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"needs the package {package}") as caught:
        opened(tmp_path, tmp_path / "cache")
    assert "sparsepipe[volumes]" in caught.value.remedy


@pytest.mark.parametrize("name", ["npy", "nii.gz", "h5", "zarr"])
def test_values_that_are_not_finite_are_refused_or_filled(tmp_path: Path, name: str) -> None:
    suffix, write = FORMATS[name]
    write_pairs(tmp_path / "root", suffix, write)
    values = volume(1).astype(np.float64)
    values[3, 2, 5:] = [np.nan, -np.inf, 1e39]  # the last one is infinite in float32
    write(tmp_path / "root" / "inputs" / "train" / f"v1.{suffix}", values)
    given = opened(tmp_path / "root", tmp_path / "cache", fill=7.0, mean=2.0)
    filled = np.where(np.abs(values) < 1e39, values, 7.0).astype(np.float32)
    assert np.array_equal(given.train_dataloader().dataset[0, 1]["input"][0], filled - 2)
    dataset = opened(tmp_path / "root", tmp_path / "cache").train_dataloader().dataset
    with pytest.raises(DataError, match=f"inputs/train/v1.{suffix} has 3 values"):
        dataset[0, 1]


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize("ignore", [None, 255])
def test_unlabelled_voxels_and_scaled_labels(
    tmp_path: Path, suffix: str, ignore: int | None
) -> None:
    write_pairs(tmp_path)
    wanted = volume(1) % 3
    wanted[0], wanted[1] = ignore or -100, -100
    (tmp_path / "labels" / "train" / "v1.npy").unlink()
    image = pytest.importorskip("nibabel").Nifti1Image(wanted * 85, np.eye(4))
    image.header.set_slope_inter(1.000003 / 85, 0)
    image.to_filename(tmp_path / "labels" / "train" / f"v1.{suffix}")
    wanted[0] = -100
    label = opened(tmp_path, tmp_path / "cache", ignore=ignore).train_dataloader().dataset[0, 1]
    assert np.array_equal(label["label"], wanted)
    few = opened(tmp_path, tmp_path / "cache", classes=["none", "some"], ignore=ignore)
    with pytest.raises(DataError, match=f"labels/train/v1.{suffix} has labels from -100"):
        few.train_dataloader().dataset[0, 1]


@pytest.mark.parametrize(
    ("of_input", "of_labels", "message"),
    [
        (np.diag([-1, 1, 1, 1]), np.eye(4), "LAS of 1 x 1 x 1 mm.*RAS of 1 x 1 x 1 mm"),
        (np.eye(4), np.eye(4) + np.eye(4, k=3), "up to 1 voxels apart"),
        (np.eye(4), np.diag([1, 1, 1.2, 1]), "RAS of 1 x 1 x 1.2 mm"),
        (np.eye(4), np.eye(4)[[1, 0, 2, 3]], "ARS of 1 x 1 x 1 mm"),
        (np.diag([-1, 1, 2, 1]), np.diag([-1 + 1e-6, 1, 2 + 1e-4, 1]), None),
        (
            np.diag([-1, 1, 2, 1]),
            None,
            r"LAS of 1 x 1 x 2 mm.*\(1 x 1 x 1 mm",
        ),  # the default of NIfTI
    ],
)
def test_inputs_and_labels_are_in_one_place(
    tmp_path: Path, of_input: Any, of_labels: Any, message: str | None
) -> None:
    nibabel = pytest.importorskip("nibabel")
    write_pairs(tmp_path)
    for kind, affine in (("inputs", of_input), ("labels", of_labels)):
        path = tmp_path / kind / "train" / "v1.npy"
        nibabel.Nifti1Image(np.load(path), affine).to_filename(path.with_suffix(".nii.gz"))
        path.unlink()
    context = nullcontext() if message is None else pytest.raises(DataError, match=message)
    with context:
        opened(tmp_path, tmp_path / "cache")


def test_odd_orientations_and_lost_chunks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pairs(tmp_path / "a", "nii", write_nifti)
    write_nifti(tmp_path / "a/inputs/test/v1.nii", volume(1), affine=np.diag([2.0, 1, 1, 1]))
    write_pairs(tmp_path / "b", "zarr", write_zarr)
    next((tmp_path / "b/inputs/train/v2.zarr").glob("**/0/0/0")).unlink()
    data = opened(tmp_path / "a", tmp_path / "cache")
    assert data.recorded()["preparation"]["orientation"] == "RAS", "that of all training inputs"
    opened(tmp_path / "b", tmp_path / "cache")
    told, lost = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"RAS of 2 x 1 x 1 mm ({tmp_path / 'a/inputs/test/v1.nii'})" in told
    assert f"{tmp_path / 'b/inputs/train/v2.zarr'} (1 of 12)" in lost


GREY, RGB = {"photometric": "minisblack"}, {"photometric": "rgb"}


@pytest.mark.parametrize(
    ("axes", "shape", "settings", "channel_axis", "wanted"),
    [
        ("ZCYX", (6, 1, 5, 8), {"ome": True, **GREY}, "first", (1, 6, 5, 8)),  # not 6 channels
        ("ZCYX", (6, 1, 5, 8), {"imagej": True, **GREY}, "first", (1, 6, 5, 8)),
        ("ZCYX", (6, 1, 5, 8), {"imagej": True, **GREY}, None, (6, 5, 8)),
        ("ZCYX", (6, 1, 5, 8), {"ome": True, **GREY}, "last", (6, 5, 8, 1)),
        ("CZYX", (1, 6, 5, 8), GREY, "last", None),
        ("CZYX", (2, 6, 5, 8), {"ome": True, **GREY}, "first", (2, 6, 5, 8)),
        ("CZYX", (2, 6, 5, 8), {"ome": True, **GREY}, "last", None),
        ("ZCYX", (6, 2, 5, 8), {"imagej": True, **GREY}, "first", None),
        ("ZYX", (6, 5, 8), GREY, "first", None),
        (None, (5, 8, 3), RGB, "last", (5, 8, 3)),
        (None, (5, 8, 3), RGB, "first", None),
        (None, (2, 5, 8), GREY, "first", (2, 5, 8)),  # axes without names
        (None, (5, 8, 2), GREY, "last", (5, 8, 2)),
    ],
)
def test_axes_of_tiff_files_are_those_that_they_name(
    tmp_path: Path, axes: str | None, shape: Any, settings: Any, channel_axis: Any, wanted: Any
) -> None:
    values = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    metadata = {"axes": axes} if axes else {}
    path = tmp_path / "a.tif"
    pytest.importorskip("tifffile").imwrite(path, values, metadata=metadata, **settings)
    refused = pytest.raises(DataError, match=r"axes \w+ of sizes .* contradicts")
    with nullcontext() if wanted else refused:
        read, geometry = read_volume(path, channel_axis=channel_axis)
        stored = np.moveaxis(read, 0, -1) if channel_axis == "last" else read
        assert stored.shape == wanted
        assert read.shape[channel_axis is not None :] == geometry.sizes
        assert np.array_equal(stored.ravel(), values.ravel())


@pytest.mark.parametrize(
    ("shapes", "reduced", "axis", "wanted"),
    [
        ([(5, 8)] * 3, 0, "first", (3, 5, 8)),
        ([(5, 8, 3)] * 2, 0, "last", (2, 5, 8, 3)),
        ([(5, 8, 3)] * 2, 0, "first", None),  # slices are not channels
        ([(5, 8), (2, 4)], 1, None, (5, 8)),  # a thumbnail
        ([(5, 8), (5, 7)], 0, None, None),
        ([SIZES, SIZES], 0, None, None),
    ],
)
def test_equal_pages_are_a_stack(
    tmp_path: Path, shapes: Any, reduced: int, axis: Any, wanted: Any
) -> None:
    path = tmp_path / "a.tif"
    kind = RGB if shapes[0][-1] == 3 else GREY
    with pytest.importorskip("tifffile").TiffWriter(path) as file:
        for n, shape in enumerate(shapes):
            file.write(volume(n, shape), subfiletype=n and reduced, **kind)
    refused = pytest.raises(DataError, match=r"it has 2 images|the axes QYXS .* contradicts")
    with nullcontext() if wanted else refused:
        read, _ = read_volume(path, channel_axis=axis)
        stored = np.moveaxis(read, 0, -1) if axis == "last" else read
        assert stored.shape == wanted
        assert np.array_equal(stored.reshape(-1, *shapes[0])[0], volume(0, shapes[0]))


@pytest.mark.parametrize(
    ("root", "settings", "message"),
    [
        (None, {}, r"data\.root=None"),
        ("input,label,split\n0.npy,0_labels.npy,test\n", {}, "no samples for training"),
        ("image,label\n0.npy,0_labels.npy\n", {}, "first line does not name input"),
        ("input,label\n0.npy,0.mhd\n", {}, "0.mhd"),
        ("input,label\n0.npy,cat\n1.npy,dog\n", {"labels": "sample", "classes": ["cat"]}, "'dog'"),
        (None, {"classes": None}, "data.labels=voxel needs data.source.classes"),
        (None, {"std": 0.0}, "std=0.0"),
    ],
)
def test_refusals_have_a_remedy(
    tmp_path: Path, root: str | None, settings: dict[str, Any], message: str
) -> None:
    place: Any = None if root is None else write_csv(tmp_path, root)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        opened(place, tmp_path / "cache", **settings)
    assert caught.value.remedy
