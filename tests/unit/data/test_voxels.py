"""Voxels against sets built one point at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sparsepipe.data.datamodule import check_dense
from sparsepipe.data.dataset import MAX_RESOLUTION
from sparsepipe.data.voxels import grid_box, occupancy, voxelise
from sparsepipe.errors import ConfigError


def brute_force(unit_N3: np.ndarray, resolution: int) -> set[tuple[int, ...]]:
    """Exact: every coordinate as a fraction, one point at a time."""
    voxels = set()
    for point in unit_N3:
        exact = [(Fraction(float(value)) + 1) * resolution / 2 for value in point]
        voxels.add(tuple(min(max(int(value // 1), 0), resolution - 1) for value in exact))
    return voxels


@pytest.mark.parametrize("resolution", [1, 2, 32, 50, 64, 65, 100, 200, 1025, MAX_RESOLUTION])
def test_voxels_are_those_of_a_set(resolution: int) -> None:
    # Multiples of 1/1024 are exact in float32, also times the resolutions up to 1,024.
    rng = np.random.default_rng(resolution)
    unit_N3 = (rng.integers(-1024, 1025, (500, 3)) / 1024).astype(np.float32)
    unit_N3[:2] = [[-1, -1, -1], [1, 1, 1]]
    coords_M3 = voxelise(unit_N3, resolution=resolution)
    assert coords_M3.dtype == np.int32
    rows = [tuple(row) for row in coords_M3.tolist()]
    assert len(rows) == len(set(rows))
    assert rows == sorted(rows)
    assert set(rows) == brute_force(unit_N3, resolution)


def test_points_outside_count_for_the_border() -> None:
    unit_N3 = np.array([[-1.5, 0.1, 3.0]], np.float32)
    assert voxelise(unit_N3, resolution=10).tolist() == [[0, 5, 9]]


def test_occupancy_holds_the_same_voxels() -> None:
    unit_N3 = np.random.default_rng(0).uniform(-1, 1, (300, 3)).astype(np.float32)
    coords_M3 = voxelise(unit_N3, resolution=20)
    grid = occupancy(coords_M3, resolution=20)
    assert grid.shape == (1, 20, 20, 20)
    assert grid.sum() == len(coords_M3)
    np.testing.assert_array_equal(np.argwhere(grid[0]), coords_M3)


def box_of(points_N3: np.ndarray, span: str) -> tuple[np.ndarray, np.ndarray]:
    center_3 = points_N3.mean(axis=0)
    radius = np.linalg.norm(points_N3 - center_3, axis=1).max()
    low_3, high_3 = points_N3.min(axis=0), points_N3.max(axis=0)
    return grid_box(low_3, high_3, center_3, float(radius), span=span)  # type: ignore[arg-type]


def test_spans() -> None:
    rng = np.random.default_rng(1)
    points_N3 = (rng.normal(size=(400, 3)) * [5, 1, 2] + [100, -7, 3]).astype(np.float32)
    units = {}
    for span in ("extent", "cube", "sphere"):
        middle_3, half_3 = box_of(points_N3, span)
        units[span] = (points_N3 - middle_3) / half_3
        assert np.abs(units[span]).max() <= 1 + 1e-5
    np.testing.assert_allclose(np.abs(units["extent"]).max(axis=0), 1, atol=1e-4)
    assert np.abs(units["cube"]).max() == pytest.approx(1, abs=1e-4)
    size_3 = np.ptp(points_N3, axis=0)
    for span in ("cube", "sphere"):
        kept_3 = np.ptp(units[span], axis=0)
        np.testing.assert_allclose(kept_3 / kept_3.max(), size_3 / size_3.max(), rtol=1e-4)
    assert np.linalg.norm(units["sphere"], axis=1).max() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(units["sphere"].mean(axis=0), 0, atol=1e-4)


@pytest.mark.parametrize("span", ["extent", "cube", "sphere"])
def test_flat_and_single_point_shapes_lie_mid_grid(span: str) -> None:
    flat_N3 = np.random.default_rng(2).uniform(size=(50, 3)).astype(np.float32)
    flat_N3[:, 1] = 4.0
    middle_3, half_3 = box_of(flat_N3, span)
    coords = voxelise((flat_N3 - middle_3) / half_3, resolution=9)
    assert set(coords[:, 1].tolist()) == {4}
    point_13 = np.full((1, 3), 2.5, np.float32)
    middle_3, half_3 = box_of(point_13, span)
    assert voxelise((point_13 - middle_3) / half_3, resolution=9).tolist() == [[4, 4, 4]]


def test_dense_beyond_memory_names_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"data\.resolution to at most") as caught:
        check_dense("dense", batch_size=64, resolution=2000, whole=True)
    fitting = int(caught.value.remedy.split("at most ")[1].split()[0])
    check_dense("dense", batch_size=64, resolution=fitting, whole=True)
    check_dense("sparse", batch_size=64, resolution=2000, whole=True)
    with pytest.raises(ConfigError, match="whole meshes"):
        check_dense("dense_surface", batch_size=1, resolution=8, whole=False)
