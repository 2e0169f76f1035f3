"""Volumes of unlike sizes: patches with class balance, padding, masks, and preparation of cases."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsepipe.data import GeneratedVolumes, VolumeDataModule, VolumeFiles
from sparsepipe.data.dataloaders import TrainSampler
from sparsepipe.data.volumes import volume_files
from sparsepipe.errors import ConfigError

SIZES = [(12, 9, 14), (7, 16, 11), (5, 6, 20), (13, 13, 13)]
PATCH = [6, 8, 10]
CLASSES = ["none", "some", "much"]


def volume(number: int) -> tuple[np.ndarray, np.ndarray]:
    """An input, and labels of which 1 is rare, 2 lies in a corner, and some voxels have none."""
    rng = np.random.default_rng(number)
    values = rng.normal(size=SIZES[number]).astype(np.float32)
    labels = (rng.random(SIZES[number]) < 0.02).astype(np.int16)
    labels[:2, :3, :4] = 2
    labels[-2:] = -100
    return values, labels


def write(root: Path) -> None:
    """Four volumes of unlike sizes, the last one for testing."""
    for number in range(4):
        split = "test" if number == 3 else "train"
        for kind, array in zip(("inputs", "labels"), volume(number), strict=True):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
            np.save(root / kind / split / f"v{number}.npy", array)


def opened(root: Path, *, data: dict[str, Any] | None = None, **source: Any) -> VolumeDataModule:
    module = VolumeDataModule(
        root,
        source=functools.partial(VolumeFiles, **{"classes": CLASSES, **source}),
        cache_dir=root.parent / "cache",
        **{"labels": "voxel", "num_workers": 0, "batch_size": 2, **(data or {})},  # type: ignore[arg-type]
    )
    module.prepare_data()
    module.setup("fit")
    return module


def padded(number: int, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    """A volume in the middle of padding, up to these sizes."""
    missing = [max(0, size - own) for size, own in zip(sizes, SIZES[number], strict=True)]
    widths = [(each // 2, each - each // 2) for each in missing]
    values, labels = volume(number)
    return np.pad(values, widths), np.pad(labels, widths, constant_values=-100)


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_patches_are_those_of_the_volume(tmp_path: Path, balance: float) -> None:
    write(tmp_path / "root")
    data = opened(tmp_path / "root", data={"patch": PATCH, "balance": balance})
    dataset = pickle.loads(pickle.dumps(data.train_dataloader().dataset))
    for epoch in range(20):
        for position in range(3):
            found = dataset[epoch, position]
            assert found["input"].shape == (1, *PATCH)
            values, labels = padded(position, PATCH)
            places = np.lib.stride_tricks.sliding_window_view(values, PATCH)
            (place,) = np.argwhere((places == found["input"][0]).all((-3, -2, -1)))
            box = tuple(slice(n, n + size) for n, size in zip(place, PATCH, strict=True))
            assert np.array_equal(found["label"], labels[box])
            again = dataset[epoch, position]
            assert found.pop("spacing").shape == (3,)
            assert all(np.array_equal(again[name], found[name]) for name in found)
    assert len({dataset[epoch, 0]["input"].tobytes() for epoch in range(20)}) > 10


def test_places_of_patches_follow_the_balance(tmp_path: Path) -> None:
    """The middles of patches of one voxel are the drawn voxels themselves."""
    write(tmp_path / "root")
    settings = {"patch": [1, 1, 1], "balance": 0.6}
    dataset = opened(tmp_path / "root", data=settings).train_dataloader().dataset
    for position in range(3):
        _, labels = volume(position)
        drawn = [int(dataset[epoch, position]["label"].item()) for epoch in range(4000)]
        for each in (-100, 0, 1, 2):
            uniform = np.mean(labels == each)
            wanted = 0.4 * uniform + (0.6 / 3 if each >= 0 else 0)
            error = np.sqrt(wanted * (1 - wanted) / len(drawn))
            assert abs(np.mean(np.array(drawn) == each) - wanted) < 4 * error
    _, labels = volume(0)
    voxels = [dataset[epoch, 0]["input"].item() for epoch in range(4000)]
    corner = volume(0)[0][labels == 2]
    counts = np.array([voxels.count(value) for value in corner.tolist()])
    expected = len(voxels) * (0.2 / len(corner) + 0.4 / labels.size)
    assert np.sum((counts - expected) ** 2 / expected) < 2 * len(corner), "chi squared"


def test_only_labelled_voxels_draw_patches(tmp_path: Path) -> None:
    write(tmp_path / "root")
    np.save(tmp_path / "root/labels/train/v1.npy", np.full(SIZES[1], 255))
    data = opened(tmp_path / "root", data={"patch": PATCH, "balance": 1.0}, ignore=255)
    label = data.train_dataloader().dataset[0, 1]["label"]
    assert (label == -100).all()
    assert data.class_counts().tolist() == [
        sum(np.sum(volume(number)[1] == each) for number in (0, 2)) for each in range(3)
    ]


def accesses(data: VolumeDataModule, epoch: int, ranks: int, rank: int) -> list[Any]:
    data._ranks = lambda: {"num_replicas": ranks, "rank": rank}  # type: ignore[method-assign]
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader.sampler, TrainSampler)
    loader.sampler.set_epoch(epoch)
    return list(loader.sampler)


def test_ranks_share_an_epoch(tmp_path: Path) -> None:
    write(tmp_path / "root")
    data = opened(tmp_path / "root", data={"patch": PATCH, "patches_per_volume": 4})
    alone = accesses(data, 3, 1, 0)
    assert sorted(position for _, position in alone) == [0] * 4 + [1] * 4 + [2] * 4
    assert len({*alone}) == 12, "each patch of a volume is another"
    assert not {*alone} & {*accesses(data, 4, 1, 0)}, "and in each epoch"
    both = [accesses(data, 3, 2, rank) for rank in range(2)]
    assert [each for pair in zip(*both, strict=True) for each in pair] == alone
    fixed = opened(tmp_path / "root", data={"patch": PATCH, "batches_per_epoch": 5})
    for ranks in (1, 3):
        assert len(accesses(fixed, 0, ranks, 0)) == 5 * 2
        assert len(fixed.train_dataloader()) == 5


def test_evaluation_reads_whole_volumes(tmp_path: Path) -> None:
    write(tmp_path / "root")
    data = opened(tmp_path / "root", data={"patch": PATCH, "val_share": 0.4})
    (validated,) = data.val_dataloader()
    (tested,) = data.test_dataloader()
    for batch, number in ((validated, int(validated["index"])), (tested, 3)):
        values, labels = volume(number)
        assert np.array_equal(batch["input"][0, 0], values)
        assert np.array_equal(batch["label"][0], labels)
        assert batch["spacing"].shape == (1, 3)
        assert batch["spacing"].isnan().all(), "the files do not say how large their voxels are"
    assert not hasattr(data.test_dataloader().dataset, "read_part")
    assert data.recorded()["patch"] == PATCH
    assert data.recorded()["sizes"] is None


@pytest.mark.parametrize("labels", ["voxel", "sample"])
def test_volumes_of_unlike_sizes_are_padded_to_the_largest(tmp_path: Path, labels: str) -> None:
    write(tmp_path / "root")
    most = tuple(np.max(SIZES, axis=0).tolist())
    root = tmp_path / "root"
    if labels == "sample":
        root = root / "inputs"
        (root / "some").mkdir()
        for split in ("train", "test"):
            (root / split).rename(root / "some" / split)
    given = {"classes": None} if labels == "sample" else {}
    data = opened(root, data={"labels": labels}, **given)
    assert data.sample_sizes == most
    assert data.recorded()["sizes"] == list(most)
    dataset = data.train_dataloader().dataset
    parts = [(0, most[0]), (2, 11), (most[0] - 1, most[0])]
    for number in range(3):
        values, voxels = np.zeros(most, np.float32), np.full(most, -100)
        inner = tuple(map(slice, SIZES[number]))
        values[inner], voxels[inner] = volume(number)
        for start, stop in parts:
            dataset.read_part(part := (slice(start, stop), slice(1, most[1]), slice(0, 5)))
            found = dataset[0, number]
            assert np.array_equal(found["input"][0], values[part])
            assert found["label"] == 0 if labels == "sample" else True
            assert labels == "sample" or np.array_equal(found["label"], voxels[part])
    if labels == "voxel":
        counts = sum(np.bincount(y[y >= 0], minlength=3) for _, y in map(volume, range(3)))
        assert np.array_equal(data.class_counts(), counts)


def test_generated_volumes_in_patches(tmp_path: Path) -> None:
    source = functools.partial(GeneratedVolumes, sizes=[24, 31], train_samples=6, test_samples=4)
    data = VolumeDataModule(
        source=source, cache_dir=tmp_path, labels="voxel", patch=[8, 40], num_workers=0
    )
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 6
    assert next(iter(data.train_dataloader()))["input"].shape == (4, 1, 8, 40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": PATCH, "labels": "sample"}, "needs labels of voxels"),
        ({"patch": PATCH, "balance": 1.5}, "balance=1.5"),
    ],
)
def test_settings_of_patches_are_checked(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write(tmp_path / "root")
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "root", data=settings)


def test_masks_and_inputs_without_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    write(root)
    rng = np.random.default_rng(0)
    masks = {number: rng.integers(0, 2, SIZES[number]).astype(np.uint8) for number in (0, 1)}
    (root / "masks" / "train").mkdir(parents=True)
    for number, mask in masks.items():
        np.save(root / "masks" / "train" / f"v{number}.npy", mask)
    (root / "labels" / "train" / "v1.npy").unlink()
    caplog.set_level("INFO")
    data = opened(root)
    assert "inputs without labels are left out: train/v1" in caplog.text
    dataset = data.train_dataloader().dataset
    assert len(dataset) == 2
    label = dataset[0, 0]["label"][tuple(map(slice, SIZES[0]))]
    assert np.array_equal(label, np.where(masks[0] == 0, -100, volume(0)[1]))
    inner = dataset[0, 1]["label"][tuple(map(slice, SIZES[2]))]
    assert np.array_equal(inner, volume(2)[1]), "without a mask all voxels count"
    table = "input,label,mask,split\n"
    table += "".join(
        f"inputs/train/v{number}.npy,{label},{mask},\n"
        for number, label, mask in (
            *((0, "labels/train/v0.npy", "masks/train/v0.npy"), (1, "", "")),
            (2, "labels/train/v2.npy", ""),
        )
    )
    (root / "volumes.csv").write_text(table)
    listed = opened(root / "volumes.csv")
    assert listed.samples("train").files == data.samples("train").files
    assert listed.fingerprint() != data.fingerprint(), "the folder has a test"
    again = listed.train_dataloader().dataset[0, 0]["label"]
    assert np.array_equal(again[tuple(map(slice, SIZES[0]))], label)


def test_the_share_for_testing_is_of_labelled_cases(tmp_path: Path) -> None:
    for kind, numbers in (("inputs", range(12)), ("labels", range(7, 12))):
        (tmp_path / "root" / kind).mkdir(parents=True)
        for number in numbers:
            for ending in ("_T1", "_T2") if kind == "inputs" else ("",):
                values = np.full((3, 4, 5), number + 100 * (ending == "_T2"))
                np.save(
                    tmp_path / "root" / kind / f"v{number:02d}{ending}.npy",
                    values % 3 if kind == "labels" else values,
                )
    data = opened(tmp_path / "root", channels=["_T1", "_T2"])
    assert data.in_channels == 2
    counts = [len(data.samples(split).files) for split in ("train", "test")]
    assert counts == [4, 1]
    for split in ("train", "test"):
        samples = data.samples(split)
        for index, file in enumerate(samples.files):
            number = int(Path(file).name[1:3])
            values = samples.read_input(index, tuple(map(slice, (3, 4, 5))))
            assert values[:, 0, 0, 0].tolist() == [number, number + 100]
            assert samples.read_label(index, (slice(1),) * 3).item() == number % 3


def write_scans(root: Path) -> None:
    """Twelve scans of unlike sizes, spacings and orientations, in two formats."""
    nibabel, sitk = pytest.importorskip("nibabel"), pytest.importorskip("SimpleITK")
    rng = np.random.default_rng(0)
    for number in range(12):
        sizes, spacing = rng.integers(8, 14, 3), rng.uniform(0.7, 2.5, 3)
        order, signs = rng.permutation(3), rng.choice([-1, 1], 3)
        split = "train" if number < 9 else "test"
        for kind in ("inputs", "labels"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
            values = rng.integers(0, 3, sizes).astype(np.int16)
            path = root / kind / split / f"scan{number}"
            if number % 2:
                image = sitk.GetImageFromArray(values.transpose(2, 1, 0))
                image.SetSpacing(spacing.tolist())
                sitk.WriteImage(image, f"{path}.nrrd")
            else:
                affine = np.eye(4)
                affine[:3, :3] = np.eye(3)[:, order] * signs * spacing
                nibabel.save(nibabel.Nifti1Image(values, affine), f"{path}.nii.gz")


def test_the_median_spacing_is_that_of_turned_training_cases(tmp_path: Path) -> None:
    write_scans(tmp_path / "root")
    data = opened(tmp_path / "root", orientation="RAS", spacing="median", intensity="zscore")
    nibabel, sitk = pytest.importorskip("nibabel"), pytest.importorskip("SimpleITK")
    turned = []
    for path in sorted((tmp_path / "root" / "inputs" / "train").iterdir()):
        if path.suffix == ".nrrd":
            turned.append(sitk.ReadImage(str(path)).GetSpacing())  # along L, P and S
        else:
            image = nibabel.as_closest_canonical(nibabel.load(path))
            turned.append(image.header.get_zooms())
    wanted = np.median(turned, axis=0)
    recorded = data.recorded()["preparation"]
    assert np.allclose(recorded["spacing"], wanted)
    samples = data.samples("train")
    assert np.allclose(samples.spacings_S, wanted)
    batch = next(iter(data.train_dataloader()))
    assert batch["spacing"].shape == (2, 3)
    for index, sizes in enumerate(samples.sizes_S):
        values = samples.read_input(index, tuple(map(slice, sizes)))
        assert values.shape == (1, *sizes)
        assert abs(values.mean()) < 1e-3
        assert samples.read_label(index, tuple(map(slice, sizes))).shape == sizes


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_cases_are_prepared_once(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_files, "_VOXELS_PER_WORKER", 1)
    write(tmp_path / "root")
    settings: dict[str, Any] = {"intensity": {"window": [-1.0, 1.0]}}
    settings["data"] = {"cache_workers": workers}
    opened(tmp_path / "root", **settings)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/volumes/**/*.npy")}
    assert len(kept) == 4 * 2, "inputs and labels"
    (tmp_path / "root").rename(tmp_path / "moved")
    again = opened(tmp_path / "moved", **settings)
    assert kept == {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/volumes/**/*.npy")
    }
    whole = again.samples("test").read_input(0, tuple(map(slice, SIZES[3])))
    assert np.allclose(whole[0], (volume(3)[0].clip(-1, 1) + 1) / 2, atol=1e-6)
    np.save(tmp_path / "moved/labels/train/v1.npy", np.zeros(SIZES[1], np.uint8))
    opened(tmp_path / "moved", **settings)
    new = {*tmp_path.glob("cache/volumes/**/*.npy")} - {*kept}
    assert len(new) == 1, "the changed label"
