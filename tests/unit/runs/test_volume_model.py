"""Label volumes of a trained network: places in the world, windows and whole volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.data.volumes.preparation import Preparation
from sparsepipe.errors import CheckpointError, ConfigError, DataError
from sparsepipe.runs.model import VolumeModel

CLASSES = ("background", "bright")
LPS = (-1, -1, 1)


class Threshold(nn.Module):
    """Says ``bright`` where the input is above a half."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([0.5 - x, x - 0.5], 1) * 20


def network(classes: int = 3, *, channels: int = 1) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv3d(channels, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, classes, 3, padding=1)
    )


def turned(seed: int) -> np.ndarray:
    """A random direction matrix, which may be a reflection."""
    directions_33, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    return directions_33


def write_block(path: Path, *, seed: int) -> np.ndarray:
    """Writes a dark volume with a bright block; returns where its middle is, in mm (RAS)."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, 30, (18, 15, 21)).astype(np.float32)
    values[3:9, 8:13, 11:17] += 500
    spacing, origin = rng.uniform(0.8, 1.6, 3), rng.uniform(-50, 50, 3)
    directions_33 = turned(seed)
    if path.name.endswith((".nii", ".nii.gz")):
        affine_44 = np.eye(4)
        affine_44[:3, :3], affine_44[:3, 3] = directions_33 * spacing, origin
        nibabel.Nifti1Image(values, affine_44).to_filename(path)
        return np.asarray(affine_44[:3] @ [5.5, 10, 13.5, 1])
    image = sitk.GetImageFromArray(values.T)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(origin.tolist())
    image.SetDirection(directions_33.ravel().tolist())
    sitk.WriteImage(image, str(path))
    middle_3: tuple[float, ...] = image.TransformContinuousIndexToPhysicalPoint([5.5, 10, 13.5])
    return np.array(middle_3) * LPS


def middle_of(path: Path) -> np.ndarray:
    """Where the middle of label 1 is in mm (RAS), as SimpleITK reads the file."""
    image = sitk.ReadImage(str(path))
    index_3 = np.argwhere(sitk.GetArrayFromImage(image).T == 1).mean(axis=0)
    place_3: tuple[float, ...] = image.TransformContinuousIndexToPhysicalPoint(index_3.tolist())
    return np.array(place_3) * LPS


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".nrrd", ".mha"])
def test_marks_the_same_place_of_the_world(tmp_path: Path, suffix: str, seed: int) -> None:
    scan, labels = tmp_path / f"scan{suffix}", tmp_path / f"labels{suffix}"
    expected = write_block(scan, seed=seed)
    preparation = Preparation(
        orientation="LPI", spacing=(1.0, 1.2, 1.1), intensity={"window": [0, 500]}
    )
    model = VolumeModel(Threshold(), CLASSES, preparation, patch=(12, 12, 12))
    found = model.predict(scan, save=labels)
    assert 130 < (found == 1).sum() < 230, "of a block of 180 voxels"
    assert np.linalg.norm(middle_of(labels) - expected) < 0.3
    images = [sitk.ReadImage(str(path)) for path in (scan, labels)]
    for name in ("GetSize", "GetSpacing", "GetOrigin", "GetDirection"):
        given, written = (np.array(getattr(each, name)()) for each in images)
        np.testing.assert_allclose(written, given, rtol=1e-6, atol=1e-6)
    assert np.array_equal(sitk.GetArrayFromImage(images[1]).T, found)
    if suffix.startswith(".nii"):
        image, given = nibabel.load(labels), nibabel.load(scan)
        assert np.array_equal(image.affine, given.affine)
        assert np.array_equal(np.asarray(image.dataobj), found)
        index_3 = np.argwhere(found == 1).mean(axis=0)
        assert np.linalg.norm(image.affine[:3] @ [*index_3, 1] - expected) < 0.3


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("sizes", [(19, 14, 23), (6, 14, 9)])
def test_windows_are_those_of_monai(tmp_path: Path, sizes: tuple[int, ...], flips: bool) -> None:
    values = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    np.save(tmp_path / "scan.npy", values)
    net = network()
    preparation = Preparation(mean=0.3, std=2.0)
    model = VolumeModel(net, "abc", preparation, patch=(8, 8, 8))

    def mirrored(x: Tensor) -> Tensor:
        axes = [[a for a in (2, 3, 4) if n >> a & 1] for n in range(0, 32, 4)][: 8 if flips else 1]
        return torch.stack([net(x.flip(a)).flip(a) for a in axes]).mean(0)

    settings: dict[str, Any] = {"overlap": 0.25, "mode": "gaussian", "sigma_scale": 0.125}
    x = torch.from_numpy((values - 0.3) / 2)[None, None]
    with torch.no_grad():
        logits = sliding_window_inference(x, (8, 8, 8), 4, mirrored, **settings)[0]
    given: dict[str, Any] = {"overlap": 0.25, "flips": flips}
    found = model.predict(tmp_path / "scan.npy", probabilities=True, **given)
    np.testing.assert_allclose(found, logits.softmax(0).numpy(), atol=1e-5)
    labels = model.predict(tmp_path / "scan.npy", **given)
    assert np.array_equal(labels, found.argmax(0))


def test_a_whole_volume_is_padded_at_its_ends_as_in_training(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 9, 7)).astype(np.float32)
    np.save(tmp_path / "scan.npy", values)
    net = network()
    model = VolumeModel(net, "abc", Preparation(), sizes=(8, 8, 8), precision="64-true")
    x = F.pad(torch.from_numpy(values)[None, None].double(), (0, 1, 0, 0, 0, 2))
    with torch.no_grad():
        expected = net(x)[0, :, :6, :9, :7].softmax(0).numpy()
    found = model.predict(tmp_path / "scan.npy", probabilities=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("intensity", ["zscore", {"percentiles": [5, 95]}])
def test_parts_of_a_file_are_prepared_as_the_whole(
    tmp_path: Path, intensity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_block(tmp_path / "scan.nii", seed=2)
    preparation = Preparation(orientation="PIL", spacing=(2.3, 0.7, 1.9), intensity=intensity)
    model = VolumeModel(network(), "abc", preparation, sizes=(40, 40, 40))
    whole_C = np.array(model.read([tmp_path / "scan.nii"], tmp_path).input_C)
    expected = model.predict(tmp_path / "scan.nii", probabilities=True)
    monkeypatch.setattr("sparsepipe.data.volumes.preparation._SLAB_BYTES", 4096)
    parts_C, *_ = model.read([tmp_path / "scan.nii"], tmp_path)
    np.testing.assert_allclose(parts_C, whole_C, atol=1e-5)
    found = model.predict(tmp_path / "scan.nii", probabilities=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_channels_of_several_files_and_their_probabilities(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((9, 8, 7)).astype(np.float32) for _ in range(2)]
    files = [tmp_path / f"case_{name}.nii" for name in ("T1", "T2")]
    affine_44 = np.diag([1.0, 2.0, 3.0, 1.0])
    for path, values in zip(files, arrays, strict=True):
        nibabel.Nifti1Image(values, affine_44).to_filename(path)
    net = network(channels=2)
    preparation = Preparation(channels=("_T1", "_T2"))
    model = VolumeModel(net, "abc", preparation, sizes=(9, 8, 7), in_channels=2)
    found = model.predict(files, save=tmp_path / "p.nii", probabilities=True)
    with torch.no_grad():
        expected = net(torch.from_numpy(np.stack(arrays))[None])[0].softmax(0).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    image = nibabel.load(tmp_path / "p.nii")
    assert np.array_equal(np.moveaxis(np.asarray(image.dataobj), -1, 0), found)
    assert np.array_equal(image.affine, affine_44)
    with pytest.raises(DataError):
        model.predict(files[0])
    stored = files[1].read_bytes()
    with pytest.raises(DataError):
        model.predict(files, save=files[1])
    assert files[1].read_bytes() == stored


def test_refuses_another_format_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", np.ones((4, 4, 4), np.float32))
    model = VolumeModel(Threshold(), CLASSES, Preparation(), sizes=(4, 4, 4))
    with pytest.raises(ConfigError):
        model.predict(tmp_path / "scan.npy", save=tmp_path / "labels.nii")
    np.save(tmp_path / "flat.npy", np.ones((4, 4), np.float32))
    for sizes in ({"sizes": (4, 4, 4)}, {"patch": (4, 4, 4)}):
        with pytest.raises(DataError):
            VolumeModel(Threshold(), CLASSES, Preparation(), **sizes).predict(tmp_path / "flat.npy")
    net = network()
    nn.init.constant_(net[2].bias, np.nan)  # type: ignore[index]
    with pytest.raises(CheckpointError):
        VolumeModel(net, "abc", Preparation(), patch=(4, 4, 4)).predict(tmp_path / "scan.npy")
