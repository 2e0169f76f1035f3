"""Places of voxels in the world: read, prepared, restored and written, against other libraries."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import map_coordinates
from scipy.spatial.transform import Rotation
from scipy.special import softmax

from sparsepipe.data.volumes import preparation
from sparsepipe.data.volumes.formats import check_replaceable, read_volume, stem_of, write_volume
from sparsepipe.data.volumes.geometry import Geometry
from sparsepipe.data.volumes.preparation import Preparation
from sparsepipe.errors import ConfigError, DataError

nibabel = pytest.importorskip("nibabel")
sitk = pytest.importorskip("SimpleITK")
tifffile = pytest.importorskip("tifffile")
SIZES, SPACING = (5, 4, 6), (1.0, 1.5, 1.1)
LPS = np.diag([-1.0, -1, 1, 1])


def write(path: Path, values: np.ndarray, affine: np.ndarray) -> None:
    """Writes an array in the order x, y, z with nibabel or SimpleITK."""
    if path.name.endswith(("nii", "nii.gz")):
        nibabel.Nifti1Image(values, affine).to_filename(path)
        return
    image, (n, lps) = sitk.GetImageFromArray(values.T.copy()), (values.ndim, LPS @ affine)
    spacing = np.linalg.norm(affine[:n, :n], axis=0)
    image.SetSpacing(spacing)
    image.SetOrigin(lps[:n, 3])
    image.SetDirection((lps[:n, :n] / spacing).ravel())
    sitk.WriteImage(image, str(path))


def marked_by_nibabel(path: Path) -> np.ndarray:
    image = nibabel.load(path)
    return nibabel.affines.apply_affine(image.affine, np.argwhere(np.asarray(image.dataobj) == 1))


def marked_by_sitk(path: Path) -> np.ndarray:
    image = sitk.ReadImage(str(path))
    found = np.argwhere(sitk.GetArrayFromImage(image).T == 1)
    points = [image.TransformIndexToPhysicalPoint(index.tolist()) for index in found]
    return np.array(points) * [-1, -1, 1]


def grid(sizes: Any) -> np.ndarray:
    return np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1).astype(float)


@pytest.mark.parametrize("suffix", ["nii.gz", "nrrd", "mha"])
@pytest.mark.parametrize("turned_by", [(0, 0, 0), (0.2, -0.15, 0.25)], ids=["axes", "oblique"])
def test_a_marked_corner_keeps_its_place(tmp_path: Path, suffix: str, turned_by: Any) -> None:
    scan, labels = tmp_path / f"scan.{suffix}", tmp_path / f"labels.{suffix}"
    made, slope = tmp_path / f"made.{suffix}", np.array([0.3, -0.7, 1.1])
    # Half the spacing and less, so that each voxel has its own label on the finer grid too.
    prepare = Preparation(orientation="PIR", spacing=(0.5, 0.37, 0.45))
    mark = np.zeros(SIZES, np.uint8)
    mark[:2, :3, :2] = 1
    orientations = itertools.product(
        itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)
    )
    for order, signs in orientations:
        affine = np.eye(4)
        axes = np.eye(3)[:, order] * signs
        affine[:3, :3] = Rotation.from_rotvec(turned_by).as_matrix() @ axes * SPACING
        affine[:3, 3] = 20, -30, 40
        world = nibabel.affines.apply_affine(affine, grid(SIZES))
        write(scan, (world @ slope).astype(np.float32), affine)
        write(labels, mark, affine)
        values, prepared, given = prepare.read([scan])
        assert given.axes == "".join(nibabel.aff2axcodes(affine))
        assert np.allclose(given.affine_44, affine, atol=1e-5)
        assert nibabel.aff2axcodes(prepared.affine_44) == (*"PIR",)
        assert np.allclose(prepared.spacing, (0.5, 0.37, 0.45))
        # A linear function of the place has the same value in the same place of the new grid.
        there = nibabel.affines.apply_affine(prepared.affine_44, grid(prepared.sizes))
        index = nibabel.affines.apply_affine(np.linalg.inv(affine), there)
        inside = ((index >= 0) & (index <= np.array(SIZES) - 1)).all(-1)
        assert inside.mean() > 0.4
        assert np.abs(values[0] - there @ slope)[inside].max() < 1e-4
        read = prepare.read_labels(labels, given)
        assert (read.shape, read.dtype) == (values.shape[1:], np.uint8)
        slabs = prepare.restored(50.0 * np.stack([read == 0, read == 1]), **both(prepared, given))
        found = np.full(SIZES, 9, np.uint8)
        for part, values_K in slabs:
            found[part] = values_K.argmax(0)
        write_volume(made, found, like=scan)
        programs = [marked_by_nibabel] * (suffix == "nii.gz") + [marked_by_sitk]
        for marked in programs:
            assert np.allclose(marked(made), world[mark == 1], atol=1e-4)


def both(prepared: Geometry, given: Geometry) -> dict[str, Geometry]:
    return {"prepared": prepared, "given": given}


@pytest.mark.parametrize("sizes", [(9,), (9, 7), (9, 7, 6)], ids=len)
def test_resampling_is_linear_interpolation_about_the_middle(
    tmp_path: Path, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_SLAB_BYTES", 40)  # several slabs
    zarr, dimensions = pytest.importorskip("zarr"), len(sizes)
    values = np.random.default_rng(0).random(sizes).astype(np.float32)
    old, new = np.array([2.0, 3, 4])[:dimensions], np.array([1.3, 2.0, 3.1])[:dimensions]
    zarr.create_array(tmp_path / "a.zarr", data=values, attributes={"spacing": old.tolist()})
    prepare = Preparation(spacing=new.tolist())
    read, prepared, given = prepare.read([tmp_path / "a.zarr"])
    assert prepared.sizes == tuple(np.round(np.array(sizes) * old / new).astype(int))

    def interpolated(array: np.ndarray, at: Any, ratio: np.ndarray) -> np.ndarray:
        middle, middle_at = (np.array(array.shape) - 1) / 2, (np.array(at) - 1) / 2
        places = (grid(at) - middle_at) * ratio + middle
        return map_coordinates(array, np.moveaxis(places, -1, 0), order=1, mode="nearest")

    assert np.allclose(read[0], interpolated(values, prepared.sizes, new / old), atol=1e-6)
    logits = np.random.default_rng(1).normal(size=(3, *prepared.sizes)).astype(np.float32)
    slabs = list(prepare.restored(logits, **both(prepared, given)))
    assert len(slabs) > 1
    found, count = np.zeros((3, *sizes)), np.zeros(sizes)
    for part, values_K in slabs:
        found[part] = values_K
        count[part] += 1
    assert (count == 1).all()
    wanted = [interpolated(each, sizes, old / new) for each in softmax(logits, axis=0)]
    assert np.allclose(found, wanted, atol=1e-6)
    # Without another spacing, nothing is interpolated.
    logits = np.random.default_rng(1).normal(size=(3, *sizes)).astype(np.float32)
    for part, values_K in Preparation().restored(logits, **both(given, given)):
        assert np.array_equal(values_K, softmax(logits, axis=0)[part])


def test_coarser_grids_are_smoothed_first(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    x_mm = (np.arange(401) - 200) * 0.1  # a Gaussian stays one, with the sum of variances
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.exp(-(x_mm**2) / 2)
        file["a"].attrs["element_size_um"] = [100.0]
    read, prepared, _ = Preparation(spacing=(2.0,)).read([tmp_path / "a.h5"])
    variance = 1 + (2.0**2 - 0.1**2) / (8 * math.log(2))
    at_mm = (np.arange(prepared.sizes[0]) - (prepared.sizes[0] - 1) / 2) * 2
    wanted = np.exp(-(at_mm**2) / 2 / variance) / math.sqrt(variance)
    assert np.allclose(read[0], wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("intensity", "wanted"),
    [
        ("zscore", lambda x: (x - x.mean()) / x.std()),
        ({"window": [20.0, 80.0]}, lambda x: (np.clip(x, 20, 80) - 20) / 60),
        (
            {"percentiles": [5.0, 75.0]},
            lambda x: np.clip(
                (x - np.quantile(x, 0.05)) / np.ptp(np.quantile(x, [0.05, 0.75])), 0, 1
            ),
        ),
    ],
)
def test_channels_of_several_files_and_their_intensity(
    tmp_path: Path, intensity: Any, wanted: Any
) -> None:
    a, b = np.random.default_rng(0).normal(50, 30, (2, 2, *SIZES)).astype(np.float32)
    b[0] = 7  # a constant channel becomes 0
    affine, files = np.diag([1, 2, 3, 1.0]), [tmp_path / "case_T1.nii", tmp_path / "case_T2.nii.gz"]
    for path, values in zip(files, (a, b), strict=True):
        write(path, np.moveaxis(values, 0, -1), affine)
    prepare = Preparation(
        channels=("_T1", "_T2"), intensity=intensity, channel_axis="last", mean=0.5, std=2.0
    )
    prepare = Preparation(**asdict(prepare))
    read, prepared, given = prepare.read(files)
    assert prepared.sizes == given.sizes == SIZES
    constant = np.full(SIZES, 0.0 if "window" not in intensity else wanted(np.full(1, 7.0))[0])
    for found, values in zip(
        read, (wanted(a[0]), wanted(a[1]), constant, wanted(b[1])), strict=True
    ):
        assert np.allclose(found, (values - 0.5) / 2, atol=1e-5)
    affine[0, 3] = 0.5  # half a voxel
    write(files[1], np.moveaxis(b, 0, -1), affine)
    with pytest.raises(DataError, match=r"0.5 voxels apart"):
        prepare.read(files)
    assert [stem_of(path) for path in files] == ["case_T1", "case_T2"]


def test_values_that_are_not_finite_do_not_spread(tmp_path: Path) -> None:
    values = np.ones(SIZES, np.float32)
    values[2, 2, 2] = np.nan
    write(tmp_path / "a.mha", values, np.eye(4))
    read, _, _ = Preparation(spacing=(0.7, 0.7, 2.0), fill=1.0).read([tmp_path / "a.mha"])
    assert np.allclose(read, 1)
    with pytest.raises(DataError, match=r"a.mha has 1 values that are not finite"):
        Preparation(spacing=(0.7, 0.7, 2.0)).read([tmp_path / "a.mha"])


def tif(path: Path, values: np.ndarray, **settings: Any) -> None:
    tifffile.imwrite(path, values, photometric="minisblack", **settings)


def ome_zarr(path: Path, values: np.ndarray, attributes: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path.parent, mode="w", attributes=attributes)
    group.create_array(path.name, data=values)


def nrrd(path: Path, values: np.ndarray, *fields: str) -> None:
    sizes = " ".join(map(str, values.shape))
    head = ("NRRD0005", "type: uint8", f"dimension: {values.ndim}", f"sizes: {sizes}")
    text = "\n".join((*head, "encoding: raw", *fields)) + "\n\n"
    path.write_bytes(text.encode() + values.T.tobytes())


def nifti(path: Path, values: np.ndarray, affine: Any, unit: str = "mm", code: int = 1) -> None:
    header = nibabel.Nifti1Header()
    header.set_data_shape(values.shape)
    header.set_xyzt_units(unit)
    header.set_zooms(np.diag(affine)[:3])
    header.set_sform(affine, code)
    nibabel.Nifti1Image(values, None, header).to_filename(path)


def h5(path: Path, values: np.ndarray, **attributes: Any) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file.create_dataset("scan", data=values).attrs.update(attributes)


def scales(*scale: float, axes: str = "zyx", unit: str = "micrometer") -> list[dict[str, Any]]:
    named = [{"name": axis, "type": "space", "unit": unit} for axis in axes]
    change = [{"type": "scale", "scale": list(scale)}]
    levels = [
        {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1] * len(scale)}]},
        {"path": "1", "coordinateTransformations": change},
    ]
    return [{"axes": named, "datasets": levels}]


TENFOLD = {"type": "scale", "scale": [10, 1, 1]}
PHYSICAL = {"PhysicalSizeX": 2.0, "PhysicalSizeY": 0.25, "PhysicalSizeYUnit": "mm"}
DIRECTIONS = ("space directions: (2,0,0) (0,0.25,0) (0,0,0.5)", "space origin: (3,4,5)")
SPACED = np.diag([2.0, 0.25, 0.5, 1])
HOLDS: list[tuple[str, Any, Any, str, tuple[float, ...]]] = [
    ("a.nii", nifti, (SPACED,), "place", (2, 0.25, 0.5)),
    ("a.nii.gz", nifti, (SPACED, "micron"), "place", (2e-3, 0.25e-3, 0.5e-3)),
    ("a.nii", nifti, (SPACED, "meter", 0), "spacing", (2e3, 250, 500)),
    ("a.nii", nifti, (np.diag([2.0, 0, 0.5, 1]),), "nothing", (1, 1, 1)),
    ("a.nrrd", nrrd, ("spacings: 2 0.25 0.5",), "spacing", (2, 0.25, 0.5)),
    ("a.nrrd", nrrd, ("spacings: 1 1 1",), "spacing", (1, 1, 1)),
    (
        "a.nrrd",
        nrrd,
        ("spacings: 2 0.25 0.5", 'units: "um" "um" "um"'),
        "spacing",
        (2e-3, 0.25e-3, 0.5e-3),
    ),
    ("a.nrrd", nrrd, ("spacings: 1 1 1", 'units: "mm" "mm" "s"'), "nothing", (1, 1, 1)),
    ("a.nrrd", nrrd, (), "nothing", (1, 1, 1)),
    ("a.nrrd", nrrd, ("space: scanner-xyz", *DIRECTIONS), "spacing", (2, 0.25, 0.5)),
    (
        "a.nrrd",
        nrrd,
        ("space: left-posterior-superior", 'space units: "um" "um" "um"', *DIRECTIONS),
        "place",
        (2e-3, 0.25e-3, 0.5e-3),
    ),
    ("a.nrrd", nrrd, ("space: RAS", *DIRECTIONS), "place", (2, 0.25, 0.5)),
    (
        "a.tif",
        tif,
        {"ome": True, "metadata": {"axes": "ZYX", "PhysicalSizeZ": 3, **PHYSICAL}},
        "spacing",
        (3e-3, 0.25, 2e-3),
    ),
    ("a.tif", tif, {"ome": True, "metadata": {"axes": "ZYX", **PHYSICAL}}, "nothing", (1, 1, 1)),
    (
        "a.tif",
        tif,
        {
            "imagej": True,
            "resolution": (4, 2),
            "metadata": {"axes": "ZYX", "spacing": 3.0, "unit": "um"},
        },
        "spacing",
        (3e-3, 0.5e-3, 0.25e-3),
    ),
    (
        "a.tif",
        tif,
        {
            "imagej": True,
            "resolution": (4, 2),
            "metadata": {"axes": "ZYX", "spacing": 3.0, "unit": "\\u00B5m"},
        },
        "spacing",
        (3e-3, 0.5e-3, 0.25e-3),
    ),
    ("a.tif", tif, {"resolution": (300, 300), "resolutionunit": "INCH"}, "nothing", (1, 1, 1)),
    (
        "b.zarr/1",
        ome_zarr,
        ({"ome": {"multiscales": scales(3, 2, 1)}},),
        "spacing",
        (3e-3, 2e-3, 1e-3),
    ),
    (
        "b.zarr/0",
        ome_zarr,
        ({"multiscales": scales(3, 2, 1, unit="millimeter")},),
        "spacing",
        (1, 1, 1),
    ),
    (
        "b.zarr/1",
        ome_zarr,
        ({"multiscales": [{**scales(3, 2, 1)[0], "coordinateTransformations": [TENFOLD]}]},),
        "spacing",
        (30e-3, 2e-3, 1e-3),
    ),
    (
        "b.zarr/1",
        ome_zarr,
        ({"multiscales": scales(3, 2, 1, unit="unknown")},),
        "nothing",
        (1, 1, 1),
    ),
    ("b.zarr/0", ome_zarr, ({},), "nothing", (1, 1, 1)),
    ("a.h5", h5, {"spacing": [3.0, 2.0, 1.0]}, "spacing", (3, 2, 1)),
    ("a.h5", h5, {"element_size_um": [3.0, 2.0, 1.0]}, "spacing", (3e-3, 2e-3, 1e-3)),
    ("a.npy", np.save, (), "nothing", (1, 1, 1)),
]


@pytest.mark.parametrize(("name", "make", "settings", "known", "spacing"), HOLDS)
def test_what_files_say_of_their_voxels_is_kept(
    tmp_path: Path, name: str, make: Any, settings: Any, known: str, spacing: Any
) -> None:
    values = np.random.default_rng(0).integers(0, 200, (3, 4, 5)).astype(np.uint8)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    more = settings if isinstance(settings, dict) else {}
    make(tmp_path / name, values, *(() if more else settings), **more)
    read, geometry = read_volume(tmp_path / name)
    assert np.array_equal(read, values)
    assert (geometry.known, geometry.sizes) == (known, (3, 4, 5))
    assert np.allclose(geometry.spacing, spacing, rtol=1e-6)
    # What is written in the same format says the same; twice, for the second replaces the first.
    made = tmp_path / f"made{'.zarr' if 'zarr' in name else name[1:]}"
    for number in (5, 7):
        write_volume(made, np.full((3, 4, 5), number, np.uint8), like=tmp_path / name)
    read, written = read_volume(made)
    assert (read == 7).all()
    assert written.known == known or name == "a.nrrd"  # ITK always writes a place
    assert np.allclose(written.spacing, geometry.spacing, rtol=1e-5)
    if name == "a.h5":
        with pytest.importorskip("h5py").File(made) as file:
            assert {*file["scan"].attrs} == {*settings}
    assert known != "place" or np.allclose(written.affine_44, geometry.affine_44, rtol=1e-5)
    probabilities = np.random.default_rng(1).random((2, 3, 4, 5)).astype(np.float32)
    write_volume(made, probabilities, like=tmp_path / name)
    axis = "last" if name.endswith(("nii", "nii.gz", "nrrd")) else "first"
    read, written = read_volume(made, channel_axis=axis)
    assert np.array_equal(read, probabilities)
    assert np.allclose(written.spacing, geometry.spacing, rtol=1e-5)
    with pytest.raises(ValueError, match="does not end with"):
        write_volume(made, probabilities[:, 1:], like=tmp_path / name)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["scan.nii", "link.nii", "case_T2.nii", "a.zarr", "folder"])
def test_data_are_not_replaced(tmp_path: Path, name: str) -> None:
    zarr = pytest.importorskip("zarr")
    write(tmp_path / "scan.nii", np.zeros(SIZES), np.eye(4))
    write(tmp_path / "case_T2.nii", np.zeros(SIZES), np.eye(4))
    (tmp_path / "link.nii").symlink_to(tmp_path / "scan.nii")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for each in "01":
        group.create_array(each, data=np.zeros(SIZES))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(DataError):
        check_replaceable(tmp_path / name, inputs=[tmp_path / "scan.nii", tmp_path / "case_T2.nii"])
    if name != "case_T2.nii":
        like = tmp_path / ("a.zarr/0" if name == "a.zarr" else "scan.nii")
        with pytest.raises(DataError):
            write_volume(tmp_path / name, np.ones(SIZES), like=like)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_labels_in_nifti_files_are_shown_as_their_input_is(tmp_path: Path) -> None:
    affine = np.array([[0, 2, 0, 1], [1, 0, 0, 2], [0, 0, -3, 3], [0, 0, 0, 1.0]])
    image = nibabel.Nifti2Image(np.random.default_rng(0).integers(0, 99, SIZES, np.int16), affine)
    image.header.set_slope_inter(0.5, -3)
    image.header.set_xyzt_units("micron", "sec")
    image.set_sform(affine, 4)
    image.set_qform(affine, 3)
    image.header["cal_max"] = 500
    image.to_filename(tmp_path / "scan.nii")
    assert read_volume(tmp_path / "scan.nii")[0].dtype == np.float32
    labels = np.random.default_rng(1).integers(0, 3, SIZES, np.uint8)
    write_volume(tmp_path / "labels.nii", labels, like=tmp_path / "scan.nii")
    written = nibabel.load(tmp_path / "labels.nii")
    assert type(written) is type(image)
    assert written.get_data_dtype() == np.uint8
    assert np.array_equal(written.dataobj, labels)
    assert (written.dataobj.slope, written.dataobj.inter) == (1, 0)
    for each, code in ((written.get_sform(coded=True), 4), (written.get_qform(coded=True), 3)):
        assert np.allclose(each[0], affine)
        assert each[1] == code
    assert written.header.get_xyzt_units()[0] == "micron"
    assert written.header["cal_max"] == 0


@pytest.mark.parametrize(
    ("settings", "name", "error"),
    [
        ({"orientation": "RAX"}, "scan.nii", ConfigError),
        ({"orientation": "RLS"}, "scan.nii", DataError),
        ({"orientation": "RA"}, "scan.nii", DataError),
        ({"orientation": "RAS"}, "scan.npy", DataError),
        ({"spacing": (1.0, 0.0, 1.0)}, "scan.nii", ConfigError),
        ({"spacing": (1.0, 1.0)}, "scan.nii", DataError),
        ({"spacing": (1.0, 1.0, 1.0)}, "scan.npy", DataError),
        ({"intensity": {"window": [3.0, 3.0]}}, "scan.npy", ConfigError),
        ({"intensity": {"window": [1.0, 3.0], "percentiles": [1.0, 9.0]}}, "scan.npy", ConfigError),
        ({"channels": ("_T1", "_T2")}, "moved.nii", DataError),
        ({"channels": ("_T1", "_T2")}, "small.npy", DataError),
        ({"channels": ("_T1", "_T2")}, "scan.npy", None),
        ({"channels": ("_T1", "_T2")}, "scan.tif", DataError),  # whose axes are z, y, x
        ({"channel_axis": "first"}, "scan.nii", DataError),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, settings: dict[str, Any], name: str, error: Any
) -> None:
    affine = np.diag([1.0, 2, 3, 1])
    write(tmp_path / "scan.nii", np.zeros(SIZES, np.uint8), affine)
    affine[1, 3] = 0.5
    write(tmp_path / "moved.nii", np.zeros(SIZES, np.uint8), affine)
    np.save(tmp_path / "scan.npy", np.zeros(SIZES, np.uint8))
    tif(tmp_path / "scan.tif", np.zeros(SIZES, np.uint8))
    np.save(tmp_path / "small.npy", np.zeros(SIZES[1:], np.uint8))
    files = [tmp_path / each for each in ["scan.nii"] * ("channels" in settings) + [name]]
    with nullcontext() if error is None else pytest.raises(error) as caught:
        prepare = Preparation(**settings)
        _, _, given = prepare.read(files[:1])
        prepare.read_labels(files[-1], given)
    assert error is None or caught.value.remedy
