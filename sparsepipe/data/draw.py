"""Which of a shape's stored points are used at one access.

Shapes: P points stored, N points kept.

The share p follows the SparsePipe paper's point sampling, whose text allows two readings:
``fixed`` keeps the share p of the drawn points (epochs get faster as p falls, as in its
Table II), ``uniform`` draws each shape's share from U(0, p]. Both act in training and in
testing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from sparsepipe.data.points import IntArray

RatioMode = Literal["fixed", "uniform"]


def draw_points(
    rng: np.random.Generator,
    *,
    stored: int,
    drawn: int,
    point_ratio: float = 1.0,
    ratio_mode: RatioMode = "fixed",
) -> IntArray | None:
    """Positions [N] of the points to use, without repetition, or None for all of them.

    Drawing ``drawn`` points and keeping a random share of them is drawing the share at once.

    Args:
        rng: source of randomness.
        stored: P, points to choose from, at least ``drawn``.
        drawn: points before the share is applied.
        point_ratio: p in (0, 1].
        ratio_mode: ``fixed`` keeps p, ``uniform`` a share from U(0, p]; at least one point.
    """
    share = point_ratio
    if ratio_mode == "uniform":
        share *= 1.0 - rng.random()  # random() is in [0, 1), so the share is in (0, p]
    kept = max(1, round(share * drawn))
    if kept == stored:
        return None
    return rng.choice(stored, kept, replace=False, shuffle=False)
