"""Airplanes."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count
from sparsepipe.data.shapes.parts import Array, Part, ball, box, rod, skin, superellipse, turned


def airplane(rng: np.random.Generator) -> list[Part]:
    """A fuselage with wings, a tail and jets or propellers."""
    length, radius = between(rng, 0.8, 1.1), between(rng, 0.07, 0.14)
    span, sweep = between(rng, 0.6, 1.1), between(rng, -0.05, 0.5)
    share = np.array([-1, -0.92, -0.75, -0.3, 0.4, 0.8, 1.0])
    girth = np.array([0.05, 0.5, 0.9, 1.0, 1.0, 0.6, 0.15]) * radius
    circle = np.column_stack([np.zeros(16), superellipse(1, 1, points=16)])
    parts = [skin([circle * r + [-s * length, 0, 0] for s, r in zip(share, girth, strict=True)])]
    chord, z = between(rng, 0.25, 0.4), radius * between(rng, -0.7, 0.9)
    x = between(rng, -0.1, 0.15)
    dihedral = between(rng, 0.0, 0.15)
    for side in (-1, 1):
        parts.append(_wing((x, 0, z), side * span, chord, sweep, dihedral))
    tail_x, tail = -length * 0.85, between(rng, 0.25, 0.4)
    high = tail * 0.9 if chance(rng, 0.3) else 0.03
    for side in (-1, 1):
        parts.append(_wing((tail_x, 0, high), side * tail, chord * 0.5, sweep * 0.4, 0.02))
    fin = _wing((tail_x, 0, 0), tail * 1.05, chord * 0.6, 0.2, 0.0)
    parts.append(turned(fin, np.pi / 2, "x"))
    return parts + _engines(rng, length, span, (x, z), sweep)


def _wing(
    root: tuple[float, float, float], span: float, chord: float, sweep: float, rise: float
) -> Part:
    rings: list[Array] = []
    profile = np.array([[0.5, 0.0], [0.1, 0.06], [-0.5, 0.0], [0.1, -0.06]])
    for share, size in ((0.0, 1.0), (1.0, 0.4)):
        ring = np.zeros((4, 3))
        ring[:, 0] = profile[:, 0] * chord * size - sweep * share * abs(span)
        ring[:, 2] = profile[:, 1] * chord * size + rise * share
        ring[:, 1] = span * share
        rings.append(ring + root)
    return skin(rings)


def _engines(
    rng: np.random.Generator, length: float, span: float, at: tuple[float, float], sweep: float
) -> list[Part]:
    x, z = at
    style = count(rng, 0, 2)
    if style == 0:  # a propeller at the nose
        blade = between(rng, 0.15, 0.25)
        return [
            box((length, -0.03, -blade), (length + 0.03, 0.03, blade)),
            ball((length, 0, 0), (0.08, 0.05, 0.05)),
        ]
    parts = []
    for place in (0.35,) if style == 1 else (0.3, 0.6):
        for side in (-1, 1):
            y, nose = side * place * span, x + 0.2 - sweep * place * span
            parts.append(rod((nose - 0.3, y, z - 0.07), (nose, y, z - 0.07), 0.055))
    return parts
