"""Guitars."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance
from sparsepipe.data.shapes.parts import Part, box, circle_angles, lathe, prism, rod, turned


def guitar(rng: np.random.Generator) -> list[Part]:
    """A waisted body, a long neck, a head with pegs; standing or lying."""
    length, half_y = between(rng, 0.42, 0.55), between(rng, 0.3, 0.4)
    thick, neck = between(rng, 0.08, 0.2), between(rng, 0.6, 0.85)
    angle = circle_angles(40)
    x, y = length * np.cos(angle), half_y * np.sin(angle)
    waist = 1 - between(rng, 0.2, 0.4) * np.exp(-(((x - 0.1 * length) / (0.3 * length)) ** 2))
    upper = np.where(x > 0, between(rng, 0.7, 0.9), 1.0)
    body = prism(np.column_stack([x, y * waist * upper]), 0, thick)
    end, wide = length + neck, between(rng, 0.035, 0.055)
    parts = [
        body,
        box((0, -wide, thick), (end, wide, thick + 0.04)),
        box((end, -wide * 1.8, thick - 0.01), (end + 0.2, wide * 1.8, thick + 0.03)),
        box((-length * 0.6, -0.1, thick), (-length * 0.5, 0.1, thick + 0.04)),
        lathe([(0.09, thick), (0.12, thick), (0.12, thick + 0.02), (0.09, thick + 0.02)]),
    ]
    for i in range(3):
        at = end + 0.04 + 0.06 * i
        parts.append(rod((at, -wide * 3, thick), (at, wide * 3, thick), 0.015, sections=6))
    if chance(rng, 0.6):  # leaning on its stand
        return [turned(part, -np.pi / 2, "y") for part in parts]
    return parts
