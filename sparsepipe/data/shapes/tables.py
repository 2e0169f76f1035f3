"""Tables: a plain table, a desk and a trolley share tops and legs; what is below differs."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count, things
from sparsepipe.data.shapes.legs import four_legs, pedestal
from sparsepipe.data.shapes.parts import Part, ball, box, prism, rod, superellipse
from sparsepipe.data.shapes.storage import drawers


def table(rng: np.random.Generator) -> list[Part]:
    """A top on four legs, a pedestal or trestles, and nothing in between."""
    half_x, half_y, height = _proportions(rng)
    thick, round_top = between(rng, 0.025, 0.05), chance(rng, 0.2)
    power = 2.0 if round_top else between(rng, 8, 14)
    top = prism(superellipse(half_x, half_y, power=power, points=36), height, height + thick)
    above = things(rng, half_x, half_y, height + thick)
    if chance(rng, 0.2):
        return [top, *above, *pedestal(rng, half_y * 0.6, height)]
    inset = 0.68 if round_top else between(rng, 0.85, 1.0)
    x, y = half_x * inset, half_y * inset
    if chance(rng, 0.2):
        return [top, *above, *_trestles(rng, x * 0.85, y, height)]
    parts = [top, *above, *four_legs(rng, x, y, height)]
    if chance(rng, 0.4):
        parts += _apron(x * 0.95, y * 0.95, height - between(rng, 0.06, 0.12), height)
    return parts


def desk(rng: np.random.Generator) -> list[Part]:
    """A table with a block of drawers on one side or both, perhaps a panel at the back."""
    half_x, half_y, height = _proportions(rng)
    thick = between(rng, 0.025, 0.05)
    parts = [box((-half_x, -half_y, height), (half_x, half_y, height + thick))]
    parts += things(rng, half_x, half_y, height + thick)
    parts += four_legs(rng, half_x, half_y, height, rungs=0.0)
    width, hang = between(rng, 0.45, 0.8) * half_x, between(rng, 0.3, 0.85) * height
    for side in (-1, 1) if chance(rng, 0.3) else (1,):
        left, right = sorted((side * half_x * 0.97, side * (half_x * 0.97 - width)))
        low, y = (left, -half_y * 0.95, height - hang), half_y * 0.9
        parts.append(box(low, (right, y, height)))
        parts += drawers(rng, (left, right), (low[1], y), (low[2], height), columns=1)
    if chance(rng, 0.4):
        low_edge = between(rng, 0.1, 0.6) * height
        parts.append(box((-half_x, -half_y, low_edge), (half_x, -half_y + 0.02, height)))
    return parts


def trolley(rng: np.random.Generator) -> list[Part]:
    """A table with one or two shelves between the legs, perhaps a handle; on wheels."""
    half_x, half_y, height = _proportions(rng)
    thick = between(rng, 0.025, 0.05)
    parts = [box((-half_x, -half_y, height), (half_x, half_y, height + thick))]
    parts += things(rng, half_x, half_y, height + thick)
    parts += four_legs(rng, half_x, half_y, height, rungs=0.0)
    for level in np.linspace(between(rng, 0.12, 0.35), 1, count(rng, 2, 3))[:-1]:
        z, x, y = level * height, half_x * 0.95, half_y * 0.95
        parts.append(box((-x, -y, z), (x, y, z + thick * 0.7)))
    size = between(rng, 0.03, 0.06)
    parts += [
        ball((x * half_x * 0.93, y * half_y * 0.93, size / 2), (size, size / 2, size))
        for x in (-1, 1)
        for y in (-1, 1)
    ]
    if chance(rng, 0.3):
        x, z = half_x + 0.06, height + between(rng, 0.03, 0.12)
        parts.append(rod((x, -half_y * 0.9, z), (x, half_y * 0.9, z), 0.02))
        parts += [
            rod((half_x * 0.9, y, height), (x, y, z), 0.018, sections=6)
            for y in (-half_y * 0.9, half_y * 0.9)
        ]
    return parts


def _proportions(rng: np.random.Generator) -> tuple[float, float, float]:
    """Half width, half depth and height, the same for all tables."""
    half_x = between(rng, 0.45, 0.8)
    return half_x, half_x * between(rng, 0.5, 0.95), between(rng, 0.5, 0.85)


def _trestles(rng: np.random.Generator, x: float, half_y: float, height: float) -> list[Part]:
    parts, thick, crossed = [], between(rng, 0.02, 0.05), chance(rng, 0.5)
    for side in (-x, x):
        if crossed:
            parts += [
                rod((side, half_y * y, 0), (side, -half_y * y * 0.8, height), thick)
                for y in (-0.85, 0.85)
            ]
        else:
            low = (side - thick, -half_y * 0.85, 0)
            parts.append(box(low, (side + thick, half_y * 0.85, height)))
    return [*parts, rod((-x, 0, height * 0.45), (x, 0, height * 0.45), thick * 0.8)]


def _apron(x: float, y: float, low: float, high: float) -> list[Part]:
    return [box((-x, side * y - 0.01, low), (x, side * y + 0.01, high)) for side in (-1, 1)]
