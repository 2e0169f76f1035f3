"""Seats: stool, chair, armchair and sofa share seats and legs; back and arms tell them apart."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count, one_of, things
from sparsepipe.data.shapes.legs import four_legs, pedestal, splayed_legs
from sparsepipe.data.shapes.parts import Part, box, loft, moved, prism, rod, superellipse, turned


def stool(rng: np.random.Generator) -> list[Part]:
    """A seat without a back, upholstered: thicker than any table's top."""
    half_x, half_y, top, parts = _seat(rng)
    thick, share = between(rng, 0.06, 0.12), between(rng, 0.8, 1.0)
    outline = superellipse(half_x * share, half_y * share, power=between(rng, 2, 8))
    parts += things(rng, half_x, half_y, top + thick, most=1)
    return [*parts, loft([outline, outline, outline * 0.85], [top, top + thick * 0.6, top + thick])]


def chair(rng: np.random.Generator) -> list[Part]:
    """A seat with a back."""
    half_x, half_y, top, parts = _seat(rng)
    return parts + _back(rng, half_x, -half_y, top, between(rng, 0.3, 0.6))


def armchair(rng: np.random.Generator) -> list[Part]:
    """A seat with a back and two arms."""
    half_x, half_y, top, parts = _seat(rng)
    parts += _back(rng, half_x, -half_y, top, between(rng, 0.3, 0.6))
    return parts + _arms(rng, half_x, half_y, top)


def _seat(rng: np.random.Generator) -> tuple[float, float, float, list[Part]]:
    """Half width, half depth, height and parts of a seat on what carries it."""
    half_x, half_y = between(rng, 0.18, 0.28), between(rng, 0.18, 0.28)
    height, thick = between(rng, 0.36, 0.6), between(rng, 0.03, 0.09)
    if chance(rng, 0.6):
        power = between(rng, 6, 10)
    else:
        power, half_y = 2.0, half_x
    parts = [prism(superellipse(half_x, half_y, power=power), height, height + thick)]
    if chance(rng, 0.3):
        parts += pedestal(rng, half_x * between(rng, 0.9, 1.2), height)
    elif power == 2.0 and chance(rng, 0.6):
        parts += splayed_legs(rng, half_x, height)
    else:
        inset = 0.75 if power == 2.0 else 1.0
        parts += four_legs(rng, half_x * inset, half_y * inset, height)
    return half_x, half_y, height + thick, parts


def _back(
    rng: np.random.Generator, half_x: float, y: float, low: float, height: float
) -> list[Part]:
    """A back that rises from the seat at depth ``y``."""
    high = low + height
    style = one_of(rng, "panel", "shield", "ladder", "bars")
    if style == "panel":
        thick, gap = between(rng, 0.025, 0.06), between(rng, 0, 0.12)
        return [
            box((-half_x, y, low + gap), (half_x, y + thick, high)),
            rod((0, y + 0.02, low - 0.03), (0, y + 0.02, low + gap + 0.02), 0.03),
        ]
    if style == "shield":
        outline = superellipse(half_x, height / 2, power=2.5)
        shield = turned(prism(outline, 0, between(rng, 0.025, 0.06)), np.pi / 2, "x")
        return [moved(shield, (0, y + 0.04, low + height / 2))]
    parts = [
        rod((x, y + 0.02, low - 0.02), (x, y, high), 0.024) for x in (-half_x + 0.02, half_x - 0.02)
    ]
    if style == "ladder":
        step = height / count(rng, 2, 4)
        tops = np.arange(high, low + step / 2, -step)
        return parts + [box((-half_x, y, z - step / 2), (half_x, y + 0.02, z)) for z in tops]
    parts += [
        rod((x, y + 0.01, low - 0.01), (x, y + 0.01, high), 0.014, sections=6)
        for x in np.linspace(-half_x, half_x, count(rng, 3, 6) + 2)[1:-1]
    ]
    return [*parts, box((-half_x, y, high - 0.07), (half_x, y + 0.03, high))]


def _arms(rng: np.random.Generator, half_x: float, half_y: float, seat: float) -> list[Part]:
    """Two rests on posts, or closed to the seat."""
    rise, reach = between(rng, 0.14, 0.24), between(rng, 0.5, 0.95) * half_y
    wide, closed = between(rng, 0.02, 0.045), chance(rng, 0.3)
    parts = []
    for x in (-half_x, half_x):
        low = seat if closed else seat + rise - 0.035
        parts.append(box((x - wide, -half_y, low), (x + wide, reach, seat + rise)))
        parts.append(rod((x, reach - 0.03, seat - 0.04), (x, reach - 0.03, seat + rise), 0.022))
    return parts
