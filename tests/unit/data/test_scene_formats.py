"""Scenes in files of other programs: points, features and labels against what was written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsepipe
from sparsepipe.config.build import build_data
from sparsepipe.data.scenes import read_scene
from sparsepipe.errors import DataError
from sparsepipe.launch.job import run_job
from tests.support.command_line import composed

POINTS = 500
RNG = np.random.default_rng(5)
FAR = np.array([4.5e5, 5.4e6, 200.0])
"""A place on a map, in metres."""
COORD = RNG.uniform(0, 30, (POINTS, 3)).round(3)
COLOR = RNG.integers(0, 256, (POINTS, 3), np.uint8)
NORMAL = RNG.standard_normal((POINTS, 3))
NORMAL /= np.linalg.norm(NORMAL, axis=1, keepdims=True)
INTENSITY = RNG.random(POINTS).astype(np.float32)
LABEL = RNG.integers(0, 5, POINTS)
Write = Callable[[Path], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """How to write a file, and which of the arrays above it has."""

    name: str
    write: Write
    columns: tuple[str, ...] | None = None
    origin: Any = (0.0, 0.0, 0.0)
    has: tuple[str, ...] = ("color", "label")
    coord_error: float = 1e-5
    color_error: float = 1e-6


def las(path: Path, points: Any = COORD) -> None:
    laspy = pytest.importorskip("laspy")
    file = laspy.create(point_format=3, file_version="1.2")
    file.header.scales, file.header.offsets = [0.001] * 3, FAR
    file.x, file.y, file.z = (FAR + points).T
    file.red, file.green, file.blue = COLOR.T.astype(np.uint16) * 257
    file.intensity, file.classification = INTENSITY * 65535, LABEL
    file.return_number = LABEL + 1
    file.write(path)


def pcd(path: Path, encoding: str) -> None:
    pypcd4 = pytest.importorskip("pypcd4")
    rgb = pypcd4.PointCloud.encode_rgb(COLOR)
    columns = [*COORD.T, rgb, INTENSITY, LABEL]
    names = ("x", "y", "z", "rgb", "intensity", "label")
    types = (*[np.float32] * 5, np.uint32)
    cloud = pypcd4.PointCloud.from_points(columns, names, types)
    cloud.save(path, encoding=pypcd4.Encoding(encoding))


def ply(path: Path, *, text: bool) -> None:
    plyfile = pytest.importorskip("plyfile")
    fields = [("x", "f8"), ("y", "f8"), ("z", "f8"), ("nx", "f4"), ("ny", "f4"), ("nz", "f4")]
    fields += [("red", "u1"), ("green", "u1"), ("blue", "u1"), ("scalar_Label", "i4")]
    table = np.empty(POINTS, fields)
    for (name, _), values in zip(fields, [*COORD.T, *NORMAL.T, *COLOR.T, LABEL], strict=True):
        table[name] = values
    plyfile.PlyData([plyfile.PlyElement.describe(table, "vertex")], text=text).write(path)


def open3d_file(path: Path) -> None:
    open3d = pytest.importorskip("open3d")
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(COORD))
    cloud.colors = open3d.utility.Vector3dVector(COLOR / 255)
    cloud.normals = open3d.utility.Vector3dVector(NORMAL)
    assert open3d.io.write_point_cloud(str(path), cloud)


def h5(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        for name, values in (("xyz", COORD), ("rgb", COLOR), ("labels", LABEL)):
            file[name] = values
        file["names"] = np.arange(5)


def kitti(path: Path) -> None:
    path.parent.mkdir(parents=True)
    np.column_stack([COORD, INTENSITY]).astype("<f4").tofile(path)
    labels = path.parent.parent / "labels" / f"{path.stem}.label"
    labels.parent.mkdir()
    (LABEL | (np.arange(POINTS) << 16)).astype("<u4").tofile(labels)


def pointcept(path: Path) -> None:
    path.mkdir()
    arrays = {"coord": COORD.astype("f4"), "color": COLOR, "normal": NORMAL.astype("f4")}
    arrays |= {"strength": INTENSITY[:, None], "segment": LABEL[:, None], "instance": LABEL}
    for name, values in arrays.items():
        np.save(path / f"{name}.npy", values)


def text(path: Path, values: Any, fmt: str, header: str = "", delimiter: str = " ") -> None:
    np.savetxt(path, np.column_stack(values), fmt, delimiter, header=header, comments="")


S3DIS = ("ceiling", "floor", "wall", "beam", "column")


def s3dis(path: Path) -> None:
    (path / "Annotations").mkdir(parents=True)
    for label, name in enumerate(S3DIS):
        rows = label == LABEL
        text(path / "Annotations" / f"{name}_1.txt", (COORD[rows], COLOR[rows]), "%.3f")
    (path / "Annotations" / ".DS_Store").write_bytes(b"\0")
    text(path / f"{path.name}.txt", (COORD, COLOR), "%.3f")


FORMATS = [
    Case(".las", las, origin=FAR, has=("color", "intensity", "return_number", "label")),
    Case(".laz", las, origin=FAR, has=("color", "intensity", "return_number", "label")),
    *[
        Case(f".{encoding}.pcd", lambda path, e=encoding: pcd(path, e), has=has)
        for encoding, has in (
            ("ascii", ("intensity", "label")),  # as text, pypcd4 rounds all colours to 0
            ("binary", ("color", "intensity", "label")),
            ("binary_compressed", ("color", "intensity", "label")),
        )
    ],
    Case(".ply", lambda path: ply(path, text=False), has=("color", "normal", "label")),
    Case(".text.ply", lambda path: ply(path, text=True), has=("color", "normal", "label")),
    *[
        Case(f".open3d.{kind}", open3d_file, has=has, coord_error=1e-5, color_error=2e-3)
        for kind, has in (("ply", ("color", "normal")), ("pcd", ("color", "normal")))
    ],
    Case(".pts", open3d_file, has=("color",), coord_error=1e-5, color_error=5e-3),
    Case(".npz", lambda p: np.savez(p, points=COORD, colors=COLOR / 255, labels=LABEL)),
    Case(".h5", h5),
    Case(
        ".npy",
        lambda path: np.save(path, np.column_stack([COORD, COLOR, LABEL])),
        columns=("x", "y", "z", "red", "green", "blue", "label"),
    ),
    Case("seq/velodyne/0.bin", kitti, has=("intensity", "label")),
    Case("", pointcept, has=("color", "normal", "intensity", "label")),
    Case("room", s3dis),
    Case(
        ".txt",  # ShapeNetPart
        lambda path: text(path, (COORD, NORMAL, LABEL), "%.7f"),
        columns=("x", "y", "z", "nx", "ny", "nz", "label"),
        has=("normal", "label"),
    ),
    Case(
        ".csv",
        lambda path: text(path, (COORD, COLOR, LABEL), "%.3f", "X,Y,Z,R,G,B,Classification", ","),
    ),
]


def written(case: Case, folder: Path) -> Path:
    path = folder / (case.name if "/" in case.name else f"scene{case.name}")
    case.write(path)
    return path


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_points_features_and_labels_are_those_that_were_written(case: Case, tmp_path: Path) -> None:
    path = written(case, tmp_path)
    scene = read_scene(path, columns=case.columns, classes=S3DIS)
    order = np.arange(POINTS)
    if case.write is s3dis:  # an object after the other, in the order of their files' names
        order = np.concatenate([np.flatnonzero(S3DIS.index(n) == LABEL) for n in sorted(S3DIS)])
    positions = scene.coords_P3.astype(np.float64) + scene.origin_3
    np.testing.assert_allclose(positions, (COORD + case.origin)[order], atol=case.coord_error)
    expected = {
        "color": COLOR / 255,
        "normal": NORMAL,
        "intensity": INTENSITY[:, None],
        "return_number": LABEL[:, None] + 1,
    }
    for name in {*case.has} - {"label"}:
        error = case.color_error if name == "color" else 2e-5
        np.testing.assert_allclose(scene.features[name], expected[name][order], atol=error)
        assert scene.features[name].dtype == np.float32
    if "label" in case.has:
        np.testing.assert_array_equal(scene.labels_P, LABEL[order])
    else:
        assert scene.labels_P is None


@pytest.mark.parametrize("damage", ["empty", "junk", "cut"])
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_a_damaged_file_is_refused_by_name(case: Case, damage: str, tmp_path: Path) -> None:
    path = written(case, tmp_path)
    folder = {pointcept: "color.npy", s3dis: "Annotations/wall_1.txt"}.get(case.write)
    file = path / folder if folder else path
    content = file.read_bytes()
    # A text that is cut off within a line lacks columns.
    cut = content.rindex(b"\n", 0, -1) + 5 if damage == "cut" else 0
    is_text = file.suffix in (".txt", ".csv", ".pts")
    kept = {"empty": b"", "junk": b"\x07junk" * 99, "cut": content[: cut if is_text else -9]}
    file.write_bytes(kept[damage])
    with pytest.raises(DataError) as caught:
        read_scene(path, columns=case.columns, classes=S3DIS)
    assert str(path) in caught.value.message


def pointcept_rooms(root: Path) -> None:
    for folder in ("train", "val", "test"):
        (root / folder).mkdir(parents=True)
        pointcept(root / folder / f"scene_{folder}")
        (root / folder / f"scene_{folder}" / "segment.npy").rename(
            root / folder / f"scene_{folder}" / "segment20.npy"
        )
    (root / "test" / "scene_test" / "segment20.npy").unlink()


def kitti_sequences(root: Path) -> None:
    for sequence in ("00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11"):
        kitti(root / "sequences" / sequence / "velodyne" / "000000.bin")
        label = root / "sequences" / sequence / "labels" / "000000.label"
        (np.array([0, 10, 40, 252, 81])[LABEL] | 7 << 16).astype("<u4").tofile(label)
    label.unlink()  # those of the test are secret


def parts_of_shapes(root: Path) -> None:
    (root / "train_test_split").mkdir(parents=True)
    (root / "synsetoffset2category.txt").write_text("Airplane\t02691156\n")
    for number, split in enumerate(("train", "val", "test")):
        path = root / "02691156" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        text(path, (COORD, NORMAL, LABEL), "%.6f")
        names = json.dumps([f"shape_data/02691156/{number}"])
        (root / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(names)


def areas(root: Path) -> None:
    for area in (1, 5):
        s3dis(root / f"Area_{area}" / "office_1")
    text(root / "Area_1" / "office_1" / "Annotations" / "stairs_1.txt", (COORD, COLOR), "%.3f")
    (root / "Area_1" / "Area_1_alignmentAngle.txt").write_text("office_1 0\n")


@pytest.mark.parametrize(
    ("group", "layout", "counts", "classes", "tested"),
    [
        ("scannet", pointcept_rooms, (1, 0, 1), 20, "val/scene_val"),
        ("semantic_kitti", kitti_sequences, (10, 0, 1), 19, "08/velodyne/000000.bin"),
        ("shapenet_part", parts_of_shapes, (1, 1, 1), 5, "02691156/2.txt"),
        ("s3dis", areas, (1, 0, 1), 13, "Area_5/office_1"),
    ],
)
def test_layouts_of_published_data(
    group: str,
    layout: Write,
    counts: tuple[int, ...],
    classes: int,
    tested: str,
    tmp_path: Path,
) -> None:
    layout(tmp_path / "root")
    settings = (f"data={group}", f"data.root={tmp_path}/root", "data.num_workers=0")
    data: Any = build_data(composed(*settings, f"data.cache_dir={tmp_path}/cache"))
    data.setup()
    assert (data.num_train, data.num_val, len(data.samples("test").files)) == counts
    assert len(data.classes) == classes
    assert data.samples("test").files[0].endswith(tested)
    (batch,) = data.test_dataloader()
    assert batch["input"].feats.shape[1] == data.in_channels
    expected = np.bincount(LABEL, minlength=classes)
    if group == "semantic_kitti":
        expected = np.zeros(19)
        expected[[0, 8, 18]] = [
            (LABEL == 1).sum() + (LABEL == 3).sum(),
            *np.bincount(LABEL)[[2, 4]],
        ]
    assert batch["label"].feats.sum(0).tolist() == expected.tolist()


@pytest.mark.full
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_each_format_is_trained_on_and_labelled_with_one_command(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = next(each for each in FORMATS if each.name == ".npz")
    learnt = case if "label" in case.has else shown  # files without labels can only be labelled
    for place in ("train/0", "train/1", "test/0"):
        Path("root", place).mkdir(parents=True)
        written(learnt, Path("root", place))
    feature = next(name for name in ("color", "intensity", "normal") if name in case.has)
    settings = (
        *("data=scenes", "data.root=root", f"data.features=[{feature}]", "data.voxel_size=1.0"),
        *(f"data.classes=[{','.join(S3DIS)}]", "data.batch_size=2", "data.num_workers=0"),
        *("model=minkunet14", "model.width=0.125", "trainer.max_epochs=1", "task.gallery=0"),
        *([f"data.columns=[{','.join(learnt.columns)}]"] if learnt.columns else ()),
    )
    run = run_job(composed(*settings, "hardware.accelerator=cpu")).path
    Path("new").mkdir()
    path = written(case, Path("new"))
    command = ("task=predict", f"checkpoint={run}", f"input={path}", "task.gallery=0")
    found = run_job(composed(*command, "hardware.accelerator=cpu")).path
    (ply,) = found.glob("scenes/**/*.ply")
    scene, expected = read_scene(ply), sparsepipe.load(run).predict(path)
    assert len(scene) == POINTS
    np.testing.assert_array_equal(scene.labels_P, expected.labels_P)
