"""Cases: bookshelf, cabinet and dresser share the carcass; fronts and inner parts differ."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count, things
from sparsepipe.data.shapes.parts import Part, box, moved, rod


def bookshelf(rng: np.random.Generator) -> list[Part]:
    """An open case: shelves, perhaps a divider, a back and books."""
    half_x, depth, height, base, parts = _carcass(rng)
    levels = np.linspace(base, height, count(rng, 3, 6) + 1)
    thick = between(rng, 0.02, 0.035)
    parts += [box((-half_x, 0, z), (half_x, depth, z + thick)) for z in levels[1:-1]]
    if chance(rng, 0.35):
        x = between(rng, -0.4, 0.4) * half_x
        parts.append(box((x, 0, base), (x + thick, depth, height)))
    if chance(rng, 0.4):
        parts += _books(rng, half_x, depth, levels)
    return parts


def cabinet(rng: np.random.Generator) -> list[Part]:
    """A case closed by doors with handles; behind them few shelves or a rail, if anything."""
    half_x, depth, height, base, parts = _carcass(rng)
    doors = 1 if half_x < 0.35 else count(rng, 2, 3)
    edges, proud = np.linspace(-half_x, half_x, doors + 1), between(rng, 0.02, 0.04)
    for left, right in pairwise(edges):
        low, high = (left + 0.02, depth, base + 0.03), (right - 0.02, depth + proud, height - 0.03)
        parts.append(box(low, high))
        z, front = between(rng, 0.4, 0.6) * height, depth + proud
        x = left + (right - left) * 0.85
        parts.append(box((x - 0.02, front, z - 0.1), (x + 0.02, front + 0.05, z + 0.1)))
    inside = count(rng, 0, 2)
    if inside == 2:
        z = height * 0.85
        parts.append(rod((-half_x, depth / 2, z), (half_x, depth / 2, z), 0.02))
    elif inside == 1:
        z = between(rng, 0.3, 0.7) * height
        parts.append(box((-half_x, 0, z), (half_x, depth, z + 0.03)))
    return parts


def dresser(rng: np.random.Generator) -> list[Part]:
    """A case full of drawers with knobs or bars."""
    half_x, depth, height, base, parts = _carcass(rng)
    columns = 1 if half_x < 0.4 else 2
    parts += drawers(rng, (-half_x, half_x), (0, depth), (base, height), columns=columns)
    return parts


def _carcass(rng: np.random.Generator) -> tuple[float, float, float, float, list[Part]]:
    """Half width, depth, height, floor and the parts of a case that is open in front."""
    half_x, depth = between(rng, 0.3, 0.6), between(rng, 0.3, 0.5)
    height, base = between(rng, 0.7, 1.4), between(rng, 0.04, 0.16)
    thick = between(rng, 0.02, 0.035)
    parts = [
        box((-half_x - thick, 0, base), (-half_x, depth, height)),
        box((half_x, 0, base), (half_x + thick, depth, height)),
        box((-half_x, 0, base), (half_x, depth, base + thick)),
        box((-half_x - 0.03, -0.02, height), (half_x + 0.03, depth + 0.03, height + thick)),
    ]
    if chance(rng, 0.5):
        above = things(rng, half_x, depth / 2, height + thick)
        parts += [moved(part, (0, depth / 2, 0)) for part in above]
    if chance(rng, 0.85):
        parts.append(box((-half_x, 0, base), (half_x, 0.02, height)))
    if chance(rng, 0.6):
        parts += [
            rod((x, y, 0), (x, y, base), 0.035, sections=8)
            for x in (-half_x + 0.05, half_x - 0.05)
            for y in (0.05, depth - 0.05)
        ]
    else:
        parts.append(box((-half_x, 0, 0), (half_x, depth - 0.05, base)))
    return half_x, depth, height, base, parts


def drawers(
    rng: np.random.Generator,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    z_range: tuple[float, float],
    *,
    columns: int,
) -> list[Part]:
    """Drawers with their boxes inside the case and fronts that stand out of it."""
    rows, proud, bar = count(rng, 2, 4), between(rng, 0.02, 0.05), chance(rng, 0.5)
    xs, zs = np.linspace(*x_range, columns + 1), np.linspace(*z_range, rows + 1)
    back, plane = y_range
    front, parts = plane + proud, []
    for left, right in pairwise(xs):
        for low, high in pairwise(zs):
            parts.append(
                box((left + 0.015, plane, low + 0.015), (right - 0.015, front, high - 0.015))
            )
            inner = (right - 0.02, plane, high - (high - low) * 0.3)
            parts.append(box((left + 0.02, back + 0.03, low + 0.03), inner))
            x, z = (left + right) / 2, (low + high) / 2
            reach = (right - left) / 5 if bar else 0.03
            parts.append(box((x - reach, front, z - 0.02), (x + reach, front + 0.04, z + 0.02)))
    return parts


def _books(rng: np.random.Generator, half_x: float, depth: float, levels: np.ndarray) -> list[Part]:
    parts, room = [], levels[1] - levels[0]
    for z in levels[:-1]:
        start = between(rng, -0.95, 0.3) * half_x
        for i in range(count(rng, 0, 4)):
            left, tall = start + i * 0.14 * half_x, between(rng, 0.5, 0.8) * room
            parts.append(box((left, 0.02, z), (left + 0.1 * half_x, depth * 0.75, z + tall)))
    return parts
