"""Random draws in the words the builders use, and what may stand on a surface."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.parts import Part, ball, box, rod


def chance(rng: np.random.Generator, probability: float) -> bool:
    """True with the given probability."""
    return bool(rng.random() < probability)


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """A uniform draw."""
    return low + (high - low) * float(rng.random())


def count(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both possible."""
    return int(rng.integers(low, high + 1))


def one_of(rng: np.random.Generator, *options: str) -> str:
    """One of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


def things(
    rng: np.random.Generator, half_x: float, half_y: float, low: float, *, most: int = 3
) -> list[Part]:
    """Up to ``most`` boxes, cans and balls that stand on a surface at height ``low``."""
    parts = []
    for _ in range(count(rng, 0, most)):
        radius, height = between(rng, 0.08, 0.35) * half_y, between(rng, 0.05, 0.6)
        x, y = between(rng, -0.8, 0.8) * half_x, between(rng, -0.7, 0.7) * half_y
        kind = one_of(rng, "box", "can", "ball")
        if kind == "box":
            wide = radius * between(rng, 0.7, 2.0)
            parts.append(box((x - wide, y - radius, low), (x + wide, y + radius, low + height)))
        elif kind == "can":
            parts.append(rod((x, y, low), (x, y, low + height), radius, sections=16))
        else:
            parts.append(ball((x, y, low + radius), (radius, radius, radius)))
    return parts
