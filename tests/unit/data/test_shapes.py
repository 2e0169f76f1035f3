"""Modelled shapes: sound, varied, and the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from sparsepipe.data.shapes import SHAPE_CLASSES, make_shape
from sparsepipe.data.shapes.generate import BUILDERS, MODELLER_VERSION
from sparsepipe.data.shapes.solids import join


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_every_class_builds_sound_meshes(name: str) -> None:
    for seed in range(20):
        mesh = make_shape(name, np.random.default_rng(seed))
        assert np.isfinite(mesh.vertices).all()
        assert mesh.faces.min() >= 0
        assert mesh.faces.max() < len(mesh.vertices)
        # Every vertex belongs to a face, so that extents are the surface's.
        assert len(np.unique(mesh.faces)) == len(mesh.vertices)
        assert 0 < mesh.area < np.inf
        assert (mesh.extents > 0.01 * mesh.extents.max()).all()


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_shapes_of_a_class_vary_before_they_are_turned_and_stretched(name: str) -> None:
    areas = []
    for seed in range(20):
        mesh = join(BUILDERS[name](np.random.default_rng(seed)))
        areas.append(mesh.area / mesh.extents.max() ** 2)
    assert np.std(areas) > 0.02 * np.mean(areas)


GOLDEN = {
    "airplane": (4916, 6.2576),
    "armchair": (5076, 20.9059),
    "bookshelf": (4636, 72.1078),
    "cabinet": (4148, 42.0581),
    "chair": (4036, 14.5254),
    "desk": (4524, 41.0270),
    "dresser": (5260, 73.1692),
    "flange": (6856, 29.9981),
    "gear": (8480, 26.5723),
    "guitar": (4120, 5.4259),
    "jug": (13536, 33.9076),
    "lamp": (3760, 6.9699),
    "mug": (12416, 42.6963),
    "pulley": (13056, 37.8190),
    "stool": (5344, 28.0895),
    "table": (6784, 21.3206),
    "trolley": (16136, 28.0876),
    "urn": (13376, 36.4731),
    "vase": (10816, 45.2996),
    "wheel": (13440, 34.3260),
}
"""Of ten shapes: faces, and the sum of areas over squared extents, as the version below."""


def test_the_modellers_version_stands_for_these_shapes() -> None:
    # Should this fail, raise MODELLER_VERSION with the new values: sets that lie on users'
    # disks must not be taken for, or mixed with, those that are modelled now.
    assert MODELLER_VERSION == 2
    assert set(GOLDEN) == set(SHAPE_CLASSES)
    for name, (faces, area) in GOLDEN.items():
        meshes = [make_shape(name, np.random.default_rng(seed)) for seed in range(10)]
        assert sum(len(mesh.faces) for mesh in meshes) == faces, name
        shares = [mesh.area / mesh.extents.max() ** 2 for mesh in meshes]
        assert sum(shares) == pytest.approx(area, rel=1e-4), name


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
