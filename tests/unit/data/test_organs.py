"""Generated organs: files as nibabel and SimpleITK read them, and anatomy in the world's frame."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import SimpleITK as sitk
from scipy import ndimage

from sparsepipe.data import GeneratedOrgans
from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.volumes.organs import ORGAN_CLASSES, make_case


def source(root: Path, **settings: int) -> GeneratedOrgans:
    counts = {"train_cases": 3, "test_cases": 1, **settings}
    cache = CacheSettings(directory=root / "cache")
    return GeneratedOrgans(root / "organs", labels="voxel", cache=cache, **counts)


def test_organs_are_where_bodies_have_them() -> None:
    orders, values = set(), []
    for number in range(6):
        value_XYZ, label_XYZ, affine_44 = make_case(np.random.default_rng([5, number]))
        assert value_XYZ.shape == label_XYZ.shape
        assert 72 <= min(label_XYZ.shape) <= max(label_XYZ.shape) <= 128
        spacing_3 = np.linalg.norm(affine_44[:3, :3], axis=0)
        assert ((spacing_3 > 1.3) & (spacing_3 < 4.75)).all()
        assert nib.aff2axcodes(affine_44) == ("R", "A", "S")
        assert np.abs(affine_44[:3, :3] / spacing_3 - np.eye(3)).max() > 1e-3  # is oblique
        volume_ml_K = np.bincount(label_XYZ.ravel(), minlength=6) * spacing_3.prod() / 1000
        assert (volume_ml_K[1:] > 15).all()
        middles = ndimage.center_of_mass(label_XYZ > -1, label_XYZ, range(1, 6))
        middle_K3 = np.array(middles) @ affine_44[:3, :3].T
        liver, spleen, right, left, vessels = middle_K3
        assert liver[0] > vessels[0] > spleen[0]
        assert right[0] > vessels[0] > left[0]
        assert min(liver[1], spleen[1]) > min(right[1], left[1]) - 20
        value_K = ndimage.mean(value_XYZ, label_XYZ, range(6))
        assert (value_K[1:] > value_K[0] + 100).all()
        values.append(value_K[1:])
        orders.add(tuple(value_K[1:].argsort()))
    assert len(orders) > 2  # no organ is always brighter than another
    assert np.ptp(values, axis=0).min() > 20


def test_files_are_what_other_programs_read_and_missing_ones_are_made_again(
    tmp_path: Path,
) -> None:
    organs = source(tmp_path)
    assert organs.classes == ORGAN_CLASSES
    folder = tmp_path / "organs" / "v1_seed0"
    files = sorted(folder.rglob("*.nii.gz"))
    contents = [file.read_bytes() for file in files]
    assert len({*contents}) == 8
    codes = set()
    for file in files[:4]:
        label_file = folder / "labels" / file.relative_to(folder / "inputs")
        image, label = nib.load(file), nib.load(label_file)
        codes.add(nib.aff2axcodes(image.affine))
        np.testing.assert_array_equal(image.affine, label.affine)
        number = [0, int(file.parent.name == "test"), int(file.name[5:9])]
        value_XYZ, label_XYZ, affine_44 = make_case(np.random.default_rng(number))
        ras, ras_label = nib.as_closest_canonical(image), nib.as_closest_canonical(label)
        np.testing.assert_allclose(ras.affine, affine_44, atol=1e-3)
        np.testing.assert_array_equal(ras.dataobj, value_XYZ)
        found_XYZ = np.asarray(ras_label.dataobj)
        is_ignored_XYZ = found_XYZ == 255
        np.testing.assert_array_equal(found_XYZ[~is_ignored_XYZ], label_XYZ[~is_ignored_XYZ])
        assert is_ignored_XYZ.any() == (file.name == "case_0003.nii.gz")
        is_slice_Z = is_ignored_XYZ.all(axis=(0, 1))
        assert is_ignored_XYZ.sum() == is_slice_Z.sum() * found_XYZ[..., 0].size
        assert np.count_nonzero(np.diff(is_slice_Z)) == is_ignored_XYZ.any()
        other = sitk.ReadImage(str(file))
        np.testing.assert_array_equal(sitk.GetArrayFromImage(other).T, image.dataobj)
        corner = other.TransformIndexToPhysicalPoint((3, 5, 7))  # type: ignore[no-untyped-call]
        place = image.affine @ [3, 5, 7, 1]
        np.testing.assert_allclose(corner * np.array([-1, -1, 1]), place[:3], atol=1e-3)
    assert len(codes) > 2

    files[0].unlink()
    files[-1].unlink()
    again = source(tmp_path, train_cases=2)
    assert [len(again.load(split).files) for split in ("train", "test")] == [2, 1]
    source(tmp_path).load("train")
    assert [file.read_bytes() for file in files] == contents
    assert again.fingerprint() != organs.fingerprint() == source(tmp_path).fingerprint()
    other_seed = source(tmp_path, seed=1, train_cases=1)
    assert other_seed.load("test").read_label(0, (slice(3),) * 3).shape == (3, 3, 3)
    assert other_seed.fingerprint() != source(tmp_path, train_cases=1).fingerprint()
