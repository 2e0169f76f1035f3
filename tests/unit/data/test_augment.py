"""Which points are drawn, and how they are varied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from sparsepipe.data.augment import Augment
from sparsepipe.data.dataset import ShapeDataset, Voxelisation
from sparsepipe.data.points import Frames, HeldArray, PointSet
from sparsepipe.errors import ConfigError

CUBE = np.random.default_rng(0).uniform(-0.5, 0.5, (2000, 3)).astype(np.float32)


def draws(stored: int, times: int, **settings: Any) -> list[NDArray[np.int64]]:
    """Numbers of the points that each of some accesses draws of a shape whose x are numbers."""
    points_1P3 = np.zeros((1, stored, 3), np.float32)
    points_1P3[0, :, 0] = np.arange(stored)
    low_13 = np.zeros((1, 3), np.float32)
    points = PointSet(
        points=HeldArray(points_1P3), rows_S=np.zeros(1, np.int64), offset_S3=low_13,
        step_S3=low_13 + 1, frames=Frames(low_13, points_1P3[:, -1], low_13, np.ones(1, "f4")),
        labels_S=np.zeros(1, np.int64), names=("line",), classes=("line",),
    )  # fmt: skip
    usual: dict[str, Any] = {"point_ratio": 1.0, "ratio_mode": "fixed", **settings}
    voxelisation = Voxelisation(
        resolution=2, span="extent", representation="sparse", up_axis="z", seed=0, **usual
    )
    dataset = ShapeDataset(points, np.zeros(1, np.int64), voxelisation=voxelisation)
    rng = np.random.default_rng(1)
    units = [dataset.unit_cloud(0, rng)[:, 0] for _ in range(times)]
    return [np.rint((each + 1) / 2 * (stored - 1)).astype(int) for each in units]


def test_points_are_drawn_without_repetition_and_uniformly() -> None:
    counts = np.zeros(60)
    for picked in draws(60, 3000, num_points=20):
        assert len(np.unique(picked)) == len(picked) == 20
        counts[picked] += 1
    # Each point is drawn in a third of the accesses: binomial counts.
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(3000 * (1 / 3) * (2 / 3))
    assert draws(50, 1, num_points=None)[0].tolist() == [*range(50)], "all need no draw"


@pytest.mark.parametrize(("share", "kept"), [(1.0, 400), (0.25, 100), (0.001, 1)])
def test_fixed_share_keeps_exactly_that_many(share: float, kept: int) -> None:
    (picked,) = draws(1000, 1, num_points=400, point_ratio=share)
    assert len(picked) == kept


def test_uniform_share_is_uniform_up_to_p() -> None:
    found = draws(2000, 2000, num_points=1000, point_ratio=0.6, ratio_mode="uniform")
    counts = np.array([len(picked) for picked in found])
    assert counts.min() >= 1
    assert counts.max() <= 600
    assert stats.kstest(counts / 600, "uniform").pvalue > 1e-3
    few = draws(30, 200, num_points=3, point_ratio=0.1, ratio_mode="uniform")
    assert {len(picked) for picked in few} == {1}, "one point at least"


def test_defaults_and_disabled_change_nothing() -> None:
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(Augment().vary(CUBE, rng), CUBE)
    strong = Augment(enabled=False, scale=(0.1, 0.2), shift=0.5, rotate_deg=180)
    np.testing.assert_array_equal(strong.vary(CUBE, rng), CUBE)


def test_scale_is_within_its_limits_and_differs_by_axis() -> None:
    rng = np.random.default_rng(5)
    factors = np.array(
        [np.ptp(Augment(scale=(0.75, 1.25)).vary(CUBE, rng), axis=0) for _ in range(200)]
    ) / np.ptp(CUBE, axis=0)
    assert factors.min() >= 0.75 - 1e-6
    assert factors.max() <= 1.25 + 1e-6
    assert stats.kstest((factors.ravel() - 0.75) / 0.5, "uniform").pvalue > 1e-3
    one = Augment(scale=(0.75, 1.25), scale_per_axis=False).vary(CUBE, rng)
    ratio_3 = np.ptp(one, axis=0) / np.ptp(CUBE, axis=0)
    assert np.ptp(ratio_3) < 1e-6


def test_shift_moves_the_whole_cloud() -> None:
    moved = Augment(shift=0.1).vary(CUBE, np.random.default_rng(6)) - CUBE
    assert np.ptp(moved, axis=0).max() < 1e-6
    assert 0 < np.abs(moved).max() <= 0.1 + 1e-6


def test_jitter_has_its_deviation_and_is_clipped() -> None:
    noise = Augment(jitter=0.02, jitter_clip=0.03).vary(CUBE, np.random.default_rng(7)) - CUBE
    assert np.abs(noise).max() <= 0.03 + 1e-6
    free = Augment(jitter=0.02, jitter_clip=1.0).vary(CUBE, np.random.default_rng(7)) - CUBE
    assert free.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize(("up_axis", "up"), [("x", 0), ("y", 1), ("z", 2)])
def test_turns_keep_the_vertical_axis_and_all_lengths(up_axis: str, up: int) -> None:
    augment = Augment(rotate_deg=180, flip=0.5)
    rng = np.random.default_rng(8)
    mirrored = 0
    for _ in range(100):
        pose_33 = augment.pose(rng, up_axis=up_axis)  # type: ignore[arg-type]
        np.testing.assert_allclose(pose_33 @ pose_33.T, np.eye(3), atol=1e-6)
        np.testing.assert_allclose(pose_33[up], np.eye(3)[up], atol=0)
        mirrored += np.linalg.det(pose_33) < 0
    assert 20 < mirrored < 80


def test_turns_stay_within_the_limit() -> None:
    augment = Augment(rotate_deg=30)
    rng = np.random.default_rng(9)
    x_3 = np.array([1, 0, 0], np.float32)
    angles = [
        np.rad2deg(np.arctan2(turned[1], turned[0]))
        for turned in (x_3 @ augment.pose(rng, up_axis="z") for _ in range(300))
    ]
    assert -30.01 <= min(angles) < -20
    assert 20 < max(angles) <= 30.01


def test_dropout_drops_up_to_its_share_and_leaves_a_point() -> None:
    rng = np.random.default_rng(10)
    shares = [1 - len(Augment(dropout=0.8).vary(CUBE, rng)) / len(CUBE) for _ in range(300)]
    assert max(shares) < 0.85
    assert np.mean(shares) == pytest.approx(0.4, abs=0.05)
    for _ in range(50):
        assert len(Augment(dropout=0.99).vary(CUBE[:1], rng)) == 1


def test_points_that_leave_the_grid_are_dropped_or_clamped() -> None:
    edge = np.array([[0.9, 0, 0], [0.1, 0, 0]], np.float32)
    dropped = Augment(scale=(2, 2), outside="drop").vary(edge, np.random.default_rng(0))
    np.testing.assert_allclose(dropped, [[0.2, 0, 0]])
    clamped = Augment(scale=(2, 2), outside="clamp").vary(edge, np.random.default_rng(0))
    np.testing.assert_allclose(clamped, [[1, 0, 0], [0.2, 0, 0]])
    alone = Augment(scale=(2, 2), outside="drop").vary(edge[:1], np.random.default_rng(0))
    np.testing.assert_allclose(alone, [[1, 0, 0]])


def test_jitter_drops_no_point_of_a_face_on_the_border() -> None:
    face_N3 = CUBE * 2
    face_N3[:, 0] = 1
    varied_N3 = Augment(jitter=0.02).vary(face_N3, np.random.default_rng(0))
    assert len(varied_N3) == len(face_N3)
    assert np.abs(varied_N3).max() <= 1


def test_rounding_drops_no_point() -> None:
    beyond_N3 = np.full((5, 3), 1 + 5e-5, np.float32)
    varied_N3 = Augment(shift=1e-6).vary(beyond_N3, np.random.default_rng(0))
    np.testing.assert_array_equal(varied_N3, np.ones((5, 3)))


@pytest.mark.parametrize(
    "bad", [{"scale": (1.2, 0.8)}, {"shift": -0.1}, {"dropout": 1.0}, {"outside": "wrap"}]
)
def test_bad_settings_name_their_key(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Augment(**bad)
