"""Sampling by area, quantisation, and voxels of the surface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh
from scipy import stats
from scipy.spatial import cKDTree

from sparsepipe.data.formats import read_shape
from sparsepipe.data.formats.off import read_off, write_off
from sparsepipe.data.shape_rows import (
    QUANTA,
    ShapeSampler,
    SurfaceVoxels,
    quantise,
    sample_triangles,
    surface_lattice,
)
from sparsepipe.data.voxels import grid_box

DIGEST = "00ff" * 8

HOUSE = """OFF5 5 0
0 0 0
2 0 0
2 2 0
0 2 0
1 1 3
4 0 1 2 3
3 0 1 4
3 1 2 4
3 2 3 4
3 3 0 4
"""


def test_points_lie_on_faces_in_proportion_to_their_area() -> None:
    mesh = trimesh.creation.cone(radius=2.0, height=0.5, sections=9)
    points_P3 = sample_triangles(mesh.triangles, 20_000, np.random.default_rng(0))
    _, distance_P, faces_P = trimesh.proximity.closest_point_naive(mesh, points_P3[:300])
    assert distance_P.max() < 1e-9
    assert len(set(faces_P.tolist())) > 10
    faces_P = _owning_face(mesh, points_P3)
    observed_F = np.bincount(faces_P, minlength=len(mesh.faces))
    expected_F = mesh.area_faces / mesh.area * len(points_P3)
    assert stats.chisquare(observed_F, expected_F).pvalue > 1e-3


def _owning_face(mesh: trimesh.Trimesh, points_P3: np.ndarray) -> np.ndarray:
    """The face each point lies in, by trying all of them with barycentric coordinates."""
    owners_P = np.full(len(points_P3), -1)
    for face, triangle_33 in enumerate(mesh.triangles):
        copies = np.broadcast_to(triangle_33, (len(points_P3), 3, 3))
        weights_P3 = trimesh.triangles.points_to_barycentric(copies, points_P3)
        rebuilt_P3 = weights_P3 @ triangle_33
        inside_P = (weights_P3 > -1e-9).all(axis=1)
        owners_P[inside_P & (np.abs(rebuilt_P3 - points_P3).max(axis=1) < 1e-9)] = face
    assert (owners_P >= 0).all()
    return owners_P


def test_points_are_uniform_inside_a_triangle() -> None:
    triangle = np.array([[[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]])
    points_P3 = sample_triangles(triangle, 20_000, np.random.default_rng(1))
    # The share of points with x + y below t is t^2.
    assert stats.kstest((points_P3[:, 0] + points_P3[:, 1]) ** 2, "uniform").pvalue > 1e-3
    assert stats.kstest(1 - (1 - points_P3[:, 0]) ** 2, "uniform").pvalue > 1e-3


def test_a_face_without_area_gets_no_point() -> None:
    triangles = np.array([[[0.0, 0, 0], [1, 0, 0], [2, 0, 0]], [[5.0, 0, 0], [6, 0, 0], [5, 1, 0]]])
    points_P3 = sample_triangles(triangles, 500, np.random.default_rng(2))
    assert points_P3[:, 0].min() >= 5


def test_quantised_points_come_back_within_half_a_step() -> None:
    points_P3 = np.random.default_rng(3).normal(size=(1000, 3)) * [1e-3, 1, 1e4] + [5, -7, 1e5]
    low_3, high_3 = points_P3.min(axis=0), points_P3.max(axis=0)
    stored_P3, frame = quantise(points_P3, low_3, high_3)
    step_3 = (high_3 - low_3) / QUANTA
    back_P3 = low_3 + stored_P3 * step_3
    assert (np.abs(back_P3 - points_P3) <= 0.501 * step_3).all()
    assert stored_P3.min(axis=0).tolist() == [0, 0, 0]
    assert stored_P3.max(axis=0).tolist() == [QUANTA] * 3
    center_3 = points_P3.mean(axis=0)
    radius = np.linalg.norm(points_P3 - center_3, axis=1).max()
    middle_3 = (low_3 + high_3) / 2
    expected = [*(low_3 - middle_3), *(high_3 - middle_3), *(center_3 - middle_3), radius]
    np.testing.assert_allclose(frame, expected, rtol=1e-5, atol=1e-2 * step_3.min())


def test_a_flat_mesh_is_quantised(tmp_path: Path) -> None:
    write_off(trimesh.Trimesh([[0, 0, 3], [1, 0, 3], [0, 1, 3]], [[0, 1, 2]]), tmp_path / "t.off")
    stored_P3, frame = ShapeSampler(50, 0)(tmp_path / "t.off", DIGEST)
    assert set(stored_P3[:, 2].tolist()) == {0}
    assert frame[2] == frame[5] == 0


GOLDEN_POINTS = [
    [50499, 22371, 30072],
    [39477, 62759, 5551],
    [27575, 24421, 0],
    [41996, 54183, 22705],
]
"""The points of a pyramid, as the versions below sample them."""


def test_the_versions_in_the_cache_key_stand_for_these_points(tmp_path: Path) -> None:
    # Should this fail, raise READER_VERSION or the algorithm's version with the new values:
    # caches of the old ones must not be taken for new.
    (tmp_path / "house.off").write_text(HOUSE)
    sampler = ShapeSampler(4, 0)
    stored_P3, frame = sampler(tmp_path / "house.off", DIGEST)
    assert sampler.settings() == {
        "reader": 2,
        "algorithm": "area-weighted 2, clouds 3",
        "points": 4,
        "seed": 0,
        "first": False,
    }
    assert np.abs(stored_P3.astype(int) - GOLDEN_POINTS).max() <= 1
    np.testing.assert_allclose(frame[:6], [-1, -1, -1.5, 1, 1, 1.5], atol=1e-6)


def test_the_draw_follows_content_and_seed_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "a.off", tmp_path / "b.off"
    for path in (first, second):
        write_off(trimesh.creation.box((1, 2, 3)), path)
    row = ShapeSampler(100, 0)(first, DIGEST)[0]
    np.testing.assert_array_equal(row, ShapeSampler(100, 0)(second, DIGEST)[0])
    assert (row != ShapeSampler(100, 1)(first, DIGEST)[0]).any()
    assert (row != ShapeSampler(100, 0)(first, "01" * 16)[0]).any()


def test_lattice_covers_slivers_and_large_triangles_alike() -> None:
    rng = np.random.default_rng(4)
    triangles_F33 = np.concatenate(
        [
            rng.uniform(0, 30, (20, 3, 3)),
            np.array([[[0, 0, 0], [300, 1, 0], [300, 1.01, 0]]], float),  # a sliver
        ]
    )
    lattice_L3 = np.concatenate(list(surface_lattice(triangles_F33)))
    samples_P3 = sample_triangles(triangles_F33, 4000, rng)
    nearest_P, _ = cKDTree(lattice_L3).query(samples_P3)
    # Steps of at most 0.25 both ways: no point is farther from the lattice than 0.25.
    assert nearest_P.max() <= 0.25
    assert len(lattice_L3) < 500_000


@pytest.mark.parametrize("resolution", [8, 25])
def test_surface_voxels_of_a_box_are_its_shell(tmp_path: Path, resolution: int) -> None:
    write_off(trimesh.creation.box((1, 2, 3)), tmp_path / "box.off")
    sampler = ShapeSampler(64, 0)
    packed, _ = SurfaceVoxels(sampler, resolution, "extent")(tmp_path / "box.off", DIGEST)
    grid = np.unpackbits(packed, count=resolution**3).reshape((resolution,) * 3)
    shell = np.ones_like(grid)
    shell[1:-1, 1:-1, 1:-1] = 0
    np.testing.assert_array_equal(grid, shell)


@pytest.mark.parametrize("span", ["extent", "cube", "sphere"])
def test_surface_voxels_hold_nearly_all_sampled_points(
    make_tree: Callable[..., Path], span: str
) -> None:
    path = make_tree(1) / "ball" / "train" / "ball_0000.off"
    sampler, side = ShapeSampler(2000, 0), 20
    packed, _ = SurfaceVoxels(sampler, side, span)(path, DIGEST)  # type: ignore[arg-type]
    grid = np.unpackbits(packed, count=side**3).reshape((side,) * 3).astype(bool)
    points_P3, low_3, high_3 = sampler.sample(read_shape(path), DIGEST)
    center_3 = points_P3.mean(axis=0).astype(np.float32)
    radius = float(np.linalg.norm(points_P3 - center_3, axis=1).max())
    middle_3, half_3 = grid_box(
        low_3.astype(np.float32),
        high_3.astype(np.float32),
        center_3,
        radius,
        span=span,  # type: ignore[arg-type]
    )
    unit_P3 = (points_P3 - middle_3) / half_3
    sites_P3 = np.clip((unit_P3 + 1) * side / 2, 0, side - 1).astype(int)
    assert grid[tuple(sites_P3.T)].mean() > 0.99
    # And only voxels near the surface: within half a voxel's diagonal and the lattice's step.
    centers_M3 = ((np.argwhere(grid) + 0.5) * 2 / side - 1) * half_3 + middle_3
    distance_M = trimesh.proximity.closest_point_naive(read_off(path), centers_M3)[1]
    assert distance_M.max() <= np.linalg.norm(half_3 / side) + 1e-6
