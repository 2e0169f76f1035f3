"""What seats and tables stand on."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count
from sparsepipe.data.shapes.parts import Part, around, box, disc, rod


def four_legs(
    rng: np.random.Generator, half_x: float, half_y: float, height: float, *, rungs: float = 0.35
) -> list[Part]:
    """Legs under a rectangle, round or square, upright or splayed; ``rungs``: their chance."""
    radius = between(rng, 0.02, 0.045)
    splay = between(rng, 0, 0.15) if chance(rng, 0.5) else 0.0
    square = splay == 0 and chance(rng, 0.5)
    parts, margin = [], np.array([radius, radius, 0])
    corners = [(1, 1), (1, -1), (-1, -1), (-1, 1)]
    for x, y in corners:
        top = np.array([x * (half_x - radius), y * (half_y - radius), height])
        foot = np.array([top[0] * (1 + splay), top[1] * (1 + splay), 0])
        if square:
            parts.append(box(foot - margin, top + margin))
        else:
            parts.append(rod(foot, top, radius))
    if chance(rng, rungs):
        level = between(rng, 0.2, 0.5)
        reach = 1 + splay * (1 - level)
        ring = [
            (x * (half_x - radius) * reach, y * (half_y - radius) * reach, level * height)
            for x, y in corners
        ]
        parts += _closed(ring, radius * 0.6)
    return parts


def splayed_legs(rng: np.random.Generator, radius: float, height: float) -> list[Part]:
    """Three or four legs that spread from under a round seat, tied by rungs."""
    spread, thick = between(rng, 1.0, 1.4), between(rng, 0.018, 0.035)
    directions = around(count(rng, 3, 4))
    parts = [
        rod(
            (radius * spread * cosine, radius * spread * sine, 0),
            (radius * 0.7 * cosine, radius * 0.7 * sine, height),
            thick,
        )
        for cosine, sine in directions
    ]
    level = between(rng, 0.25, 0.5)
    reach = radius * (spread + (0.7 - spread) * level)
    ring = [(reach * cosine, reach * sine, level * height) for cosine, sine in directions]
    return parts + _closed(ring, thick * 0.7)


def pedestal(rng: np.random.Generator, reach: float, height: float) -> list[Part]:
    """A central column on a disc, or on a star of feet."""
    parts = [disc(between(rng, 0.03, 0.07), 0, height)]
    if chance(rng, 0.5):
        return [*parts, disc(reach, 0, between(rng, 0.02, 0.06))]
    return parts + [
        rod((0, 0, 0.08), (reach * cosine, reach * sine, 0.03), 0.035, sections=6)
        for cosine, sine in around(count(rng, 3, 5))
    ]


def _closed(ring: list[tuple[float, float, float]], radius: float) -> list[Part]:
    """Bars from each point to the next and back to the first."""
    return [
        rod(start, end, radius, sections=6)
        for start, end in zip(ring, ring[1:] + ring[:1], strict=True)
    ]
