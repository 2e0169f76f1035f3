"""The classes of the embedded data set and the one way to build a shape of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import trimesh

from sparsepipe.data.shapes import (
    airplane,
    guitar,
    lamp,
    seating,
    storage,
    tables,
    vessels,
    wheels,
)
from sparsepipe.data.shapes.draw import between
from sparsepipe.data.shapes.parts import Part, join
from sparsepipe.errors import ConfigError

Builder: TypeAlias = Callable[[np.random.Generator], list[Part]]

BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "airplane": airplane.airplane,
        "armchair": seating.armchair,
        "bookshelf": storage.bookshelf,
        "cabinet": storage.cabinet,
        "chair": seating.chair,
        "desk": tables.desk,
        "dresser": storage.dresser,
        "flange": wheels.flange,
        "gear": wheels.gear,
        "guitar": guitar.guitar,
        "jug": vessels.jug,
        "lamp": lamp.lamp,
        "mug": vessels.mug,
        "pulley": wheels.pulley,
        "stool": seating.stool,
        "table": tables.table,
        "trolley": tables.trolley,
        "urn": vessels.urn,
        "vase": vessels.vase,
        "wheel": wheels.wheel,
    }
)
SHAPE_CLASSES: tuple[str, ...] = tuple(BUILDERS)


def make_shape(class_name: str, rng: np.random.Generator) -> trimesh.Trimesh:
    """A new object of a class, drawn from ``rng``: z up, turned at random, scaled at random.

    Raises:
        ConfigError: there is no such class.
    """
    if class_name not in BUILDERS:
        raise ConfigError(
            f"there is no shape class {class_name!r}",
            remedy=f"Choose from {', '.join(SHAPE_CLASSES)}.",
        )
    mesh = join(BUILDERS[class_name](rng))
    angle, scale = between(rng, 0, 2 * np.pi), np.exp(between(rng, -1, 1))
    # Proportions vary beyond what the builder draws, as they do between makers.
    stretch_3 = scale * np.exp(rng.uniform(-0.3, 0.3, 3))
    cosine, sine = np.cos(angle), np.sin(angle)
    turn_33 = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    mesh.vertices = np.asarray(mesh.vertices) * stretch_3 @ turn_33.T
    return mesh
