"""Shapes in map coordinates have the voxels that they have at the origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparsepipe.data.dataset import ShapeDataset, Voxelisation
from sparsepipe.data.points import Frames, MappedArray, PointSet, measure_frames
from sparsepipe.data.shape_rows import ShapeSampler, SurfaceVoxels
from sparsepipe.data.sources import CacheSettings, NormalResampled, NpzBundle
from sparsepipe.data.voxels import Span, grid_box, voxelise
from sparsepipe.errors import DataError
from tests.support.guide_cases import write_files

OFFSETS = (1e5, 5e6, 1e8)
SHAPES, POINTS = 3, 600


def clouds() -> NDArray[np.float64]:
    """Bent surfaces, some units long."""
    rng = np.random.default_rng(3)
    flat_SP2 = rng.uniform(-1, 1, (SHAPES, POINTS, 2))
    height_SP1 = np.sin(3 * flat_SP2[..., :1]) * flat_SP2[..., 1:]
    return np.concatenate([flat_SP2, height_SP1], axis=2) * [[[3.0]], [[0.5]], [[40.0]]]


def written_npz(points_SP3: NDArray[np.float64], root: Path, settings: CacheSettings) -> PointSet:
    return bundle(root, settings, points=points_SP3)


def written_integers(
    points_SP3: NDArray[np.float64], root: Path, settings: CacheSettings
) -> PointSet:
    """Integers times a scale, as LAS files have them."""
    integers_SP3 = np.rint(points_SP3 * 1e4).astype(np.int64)
    return bundle(root, settings, points=integers_SP3, scale=np.float64(1e-4))


def written_with_offset(
    points_SP3: NDArray[np.float64], root: Path, settings: CacheSettings
) -> PointSet:
    """With an offset beside, as LAS files have it, so that 32 bits are enough."""
    offset_3 = np.floor(points_SP3[0, 0] / 1000) * 1000
    integers_SP3 = np.rint((points_SP3 - offset_3) * 1e4).astype(np.int32)
    found = bundle(root, settings, points=integers_SP3, scale=np.float64(1e-4), offset=offset_3)
    origin_S3 = 0 if found.frames.origin_S3 is None else found.frames.origin_S3
    middle_S3 = (found.frames.low_S3 + found.frames.high_S3.astype(np.float64)) / 2 + origin_S3
    expected_S3 = (points_SP3.min(axis=1) + points_SP3.max(axis=1)) / 2
    np.testing.assert_allclose(middle_S3, expected_S3, atol=1e-3)
    return found


def bundle(root: Path, settings: CacheSettings, **arrays: NDArray[np.generic]) -> PointSet:
    for split in ("train", "test"):
        labels_S, classes = np.arange(SHAPES) % 2, np.array(["a", "b"])
        np.savez(root / f"{split}.npz", labels=labels_S, classes=classes, **arrays)
    return NpzBundle(root).load("train", settings)


def written_text(points_SP3: NDArray[np.float64], root: Path, settings: CacheSettings) -> PointSet:
    (root / "vase").mkdir()
    names = [f"vase_{number}" for number in range(SHAPES)]
    for name, points_P3 in zip(names, points_SP3, strict=True):
        table = np.concatenate([points_P3, np.zeros_like(points_P3)], axis=1)
        np.savetxt(root / "vase" / f"{name}.txt", table, fmt="%.9f", delimiter=",")
    (root / "modelnet40_shape_names.txt").write_text("vase\n")
    for split in ("train", "test"):
        (root / f"modelnet40_{split}.txt").write_text("\n".join(names) + "\n")
    return NormalResampled(root).load("train", settings)


def written_arrays(
    points_SP3: NDArray[np.float64], root: Path, settings: CacheSettings
) -> PointSet:
    """The source of docs/extending.md."""
    np.save(root / "train_points.npy", points_SP3)
    np.save(root / "train_labels.npy", np.zeros(SHAPES, np.int64))
    write_files("extending", root)
    space: dict[str, Any] = {}
    exec((root / "data_source.py").read_text(), space)
    found: PointSet = space["Arrays"](str(root)).load("train", settings)
    return found


def voxels(points: PointSet, span: Span) -> list[set[tuple[int, ...]]]:
    settings = Voxelisation(
        resolution=32, span=span, representation="sparse", num_points=None, point_ratio=1.0,
        ratio_mode="fixed", up_axis="z", seed=0,
    )  # fmt: skip
    shapes = ShapeDataset(points, np.arange(SHAPES), voxelisation=settings)
    return [set(map(tuple, shapes[0, s]["coords"].tolist())) for s in range(SHAPES)]


def assert_same(found: list[set[tuple[int, ...]]], expected: list[set[tuple[int, ...]]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert len(theirs) > 150
        assert len(ours ^ theirs) <= 0.01 * len(theirs)


@pytest.mark.parametrize("span", ["extent", "cube", "sphere"])
@pytest.mark.parametrize(
    "source", [written_npz, written_integers, written_with_offset, written_text, written_arrays]
)
def test_voxels_of_clouds(
    source: Callable[..., PointSet], span: Span, tmp_path: Path, settings: CacheSettings
) -> None:
    found = []
    for offset in (0.0, *OFFSETS):
        root = tmp_path / f"{offset:g}"
        root.mkdir()
        settings = CacheSettings(directory=tmp_path / "cache", points=POINTS)
        moved_SP3 = clouds() + np.array([offset, -offset, 0.1 * offset])
        found.append(voxels(source(moved_SP3, root, settings), span))
    for others in found[1:]:
        assert_same(others, found[0])


@pytest.mark.parametrize("span", ["extent", "cube", "sphere"])
def test_voxels_of_meshes(tmp_path: Path, span: Span) -> None:
    """Points sampled with the same seed, and the surface itself."""
    rng = np.random.default_rng(2)
    vertices_V3 = rng.uniform(-2, 2, (30, 3))
    faces_F3 = rng.permuted(np.tile(np.arange(30), (40, 1)), axis=1)[:, :3]
    sampler, side = ShapeSampler(points=4096, seed=0), 32
    points, surfaces = [], []
    for offset in (0.0, *OFFSETS):
        path = tmp_path / f"{offset:g}.off"
        lines = [" ".join(f"{x:.9f}" for x in v) for v in vertices_V3 + offset]
        lines += [f"3 {a} {b} {c}" for a, b, c in faces_F3]
        path.write_text("\n".join([f"OFF\n30 {len(faces_F3)} 0", *lines]))
        steps_P3, frame = sampler(path, "0")
        middle_3, half_3 = grid_box(frame[:3], frame[3:6], frame[6:9], frame[9], span=span)
        cloud_P3 = steps_P3 / 65_535 * (frame[3:6] - frame[:3]) + frame[:3]
        coords_M3 = voxelise((cloud_P3 - middle_3) / half_3, resolution=side)
        points.append(set(map(tuple, coords_M3.tolist())))
        bits, _ = SurfaceVoxels(sampler=sampler, resolution=side, span=span)(path, "0")
        surfaces.append({(int(key),) for key in np.flatnonzero(np.unpackbits(bits))})
    for found in (points, surfaces):
        assert_same(found[1:], [found[0]] * len(OFFSETS))


def test_shapes_near_the_origin_stay_where_they_are() -> None:
    assert measure_frames(clouds(), 1.0).origin_S3 is None


def test_coarse_points_are_told(
    tmp_path: Path, settings: CacheSettings, caplog: pytest.LogCaptureFixture
) -> None:
    moved_SP3 = (clouds() + 5e6).astype(np.float32)
    bundle(tmp_path, settings, points=moved_SP3)
    assert "points of 3 of 3 shapes in float32 are so far from the origin" in caplog.text


def test_a_shape_of_a_single_point_lies_anywhere(tmp_path: Path) -> None:
    points_SP3 = np.full((SHAPES, POINTS, 3), 7, "f4")
    np.save(tmp_path / "points.npy", points_SP3)
    corner_S3, zero_S3 = points_SP3[:, 0], np.zeros((SHAPES, 3))
    points = PointSet(
        MappedArray(tmp_path / "points.npy"), np.arange(SHAPES), zero_S3, zero_S3 + 1,
        Frames(corner_S3, corner_S3, corner_S3, np.zeros(SHAPES, "f4")),
        np.zeros(SHAPES, np.int64), ("a", "b", "c"), ("x",),
    )  # fmt: skip
    assert points.cloud(0)[0].tolist() == [7, 7, 7]


def test_frames_in_single_precision_far_away_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "points.npy", clouds() + 5e6)
    exact = clouds() + 5e6
    low_S3, high_S3 = exact.min(axis=1).astype("f4"), exact.max(axis=1).astype("f4")
    frames = Frames(low_S3, high_S3, low_S3, np.ones(SHAPES, "f4"))
    zero_S3 = np.zeros((SHAPES, 3))
    with pytest.raises(
        DataError, match="3 of 3 shapes that are far from the origin, such as a"
    ) as raised:
        PointSet(
            MappedArray(tmp_path / "points.npy"), np.arange(SHAPES), zero_S3, zero_S3 + 1, frames,
            np.zeros(SHAPES, np.int64), ("a", "b", "c"), ("x",),
        )  # fmt: skip
    assert "measure_frames" in str(raised.value.remedy)
