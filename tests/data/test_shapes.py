from __future__ import annotations

import numpy as np
import pytest

from sparsepipe.data.shapes import SHAPE_CLASSES, make_shape
from sparsepipe.errors import ConfigError


def test_there_are_enough_distinct_classes() -> None:
    assert len(SHAPE_CLASSES) >= 16
    assert len(set(SHAPE_CLASSES)) == len(SHAPE_CLASSES)
    assert list(SHAPE_CLASSES) == sorted(SHAPE_CLASSES)


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_every_class_builds_sound_meshes(name: str) -> None:
    proportions = []
    for seed in range(20):
        mesh = make_shape(name, np.random.default_rng(seed))
        assert np.isfinite(mesh.vertices).all()
        assert mesh.faces.min() >= 0
        assert mesh.faces.max() < len(mesh.vertices)
        # Every vertex belongs to a face, so that extents are the surface's.
        assert len(np.unique(mesh.faces)) == len(mesh.vertices)
        assert 0 < mesh.area < np.inf
        assert (mesh.extents > 0.01 * mesh.extents.max()).all()
        x, y, z = mesh.extents
        proportions.append([x / z, y / z, mesh.area / z**2])
    assert (np.std(proportions, axis=0) > 0.01).all(), "shapes of a class must vary"


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_equal_seeds_give_equal_shapes_and_others_differ(name: str) -> None:
    first, again, other = (make_shape(name, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.vertices, again.vertices)
    assert np.array_equal(first.faces, again.faces)
    assert first.vertices.shape != other.vertices.shape or not np.allclose(
        first.vertices, other.vertices
    )


def test_shapes_are_turned_about_the_vertical_axis() -> None:
    # A guitar is long: its longest horizontal direction must not prefer any angle.
    angles = []
    for seed in range(200):
        mesh = make_shape("guitar", np.random.default_rng(seed))
        flat = mesh.vertices[:, :2] - mesh.vertices[:, :2].mean(axis=0)
        _, axes = np.linalg.eigh(flat.T @ flat)
        angles.append(np.arctan2(axes[1, -1], axes[0, -1]) % np.pi)
    counts, _ = np.histogram(angles, bins=4, range=(0, np.pi))
    assert counts.min() > 25


def test_scales_vary() -> None:
    sizes = [make_shape("gear", np.random.default_rng(seed)).extents.max() for seed in range(50)]
    assert max(sizes) > 3 * min(sizes)


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="'spoon'") as caught:
        make_shape("spoon", np.random.default_rng(0))
    assert "airplane" in caught.value.remedy
