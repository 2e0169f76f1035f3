"""Lamps."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance
from sparsepipe.data.shapes.parts import Part, ball, disc, lathe, moved, rod


def lamp(rng: np.random.Generator) -> list[Part]:
    """A foot, a pole and a shade: on the floor, on a table, or at the end of an arm."""
    height, shade = between(rng, 0.5, 1.5), between(rng, 0.14, 0.3)
    parts = [disc(between(rng, 0.1, 0.22), 0, between(rng, 0.02, 0.07))]
    reach = between(rng, 0.2, 0.5) if chance(rng, 0.35) else 0.0
    pole = between(rng, 0.012, 0.03)
    parts.append(rod((0, 0, 0), (0, 0, height), pole))
    if reach:
        drop = between(rng, -0.1, 0.3)
        parts.append(rod((0, 0, height), (reach, 0, height + 0.3 - drop), pole))
        top = height + 0.32 - drop
    elif chance(rng, 0.4):  # a body of turned wood or ceramics
        parts.append(ball((0, 0, height * 0.35), (0.12, 0.12, height * 0.25)))
        top = height + 0.05
    else:
        top = height + 0.05
    return [*parts, _shade(rng, reach, top, shade)]


def _shade(rng: np.random.Generator, x: float, top: float, radius: float) -> Part:
    tall, upper = radius * between(rng, 0.8, 1.5), between(rng, 0.35, 1.0)
    wall = 0.012
    profile = [
        (radius, -tall),
        (radius * upper, 0.0),
        (radius * upper - wall, 0.0),
        (radius - wall, -tall),
        (radius, -tall),
    ]
    return moved(lathe(profile), (x, 0, top + tall * 0.2))
