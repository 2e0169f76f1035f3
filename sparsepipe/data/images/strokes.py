"""Digits as strokes of a pen, varied and drawn. Pure.

Each digit is a list of lines between points, in a square from (-1, -1) at the lower left to (1, 1).
Curves are many short lines. The pen's ink fades over a pixel at its edge.

Shapes: B images, L lines, 2 ends of x and y, P pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Point = tuple[float, float]

_MOST_LINES = 24
"""Of a digit; one with fewer has its last line several times."""
_FADE = 1.0
"""Pixels over which ink fades."""


def _arc(
    center: Point, radii: Point, from_deg: float, to_deg: float, lines: int = 10
) -> list[Point]:
    """Points of an arc, against the clock where ``to_deg`` is larger."""
    turns = np.radians(np.linspace(from_deg, to_deg, lines + 1))
    return [
        (center[0] + radii[0] * math.cos(turn), center[1] + radii[1] * math.sin(turn))
        for turn in turns
    ]


_STROKES: Sequence[Sequence[Sequence[Point]]] = (
    [_arc((0, 0), (0.6, 0.9), 90, 450, 20)],
    [[(-0.3, 0.55), (0.05, 0.9), (0.05, -0.9)]],
    [[*_arc((0, 0.4), (0.55, 0.5), 160, -40, 10), (-0.6, -0.9), (0.65, -0.9)]],
    [
        [
            *_arc((-0.05, 0.45), (0.5, 0.45), 150, -80, 10),
            *_arc((-0.05, -0.42), (0.6, 0.48), 85, -150, 11),
        ]
    ],
    [[(0.15, 0.9), (-0.6, -0.25), (0.65, -0.25)], [(0.3, 0.35), (0.3, -0.9)]],
    [[(0.5, 0.9), (-0.4, 0.9), (-0.5, 0.1), *_arc((-0.05, -0.35), (0.6, 0.55), 120, -140, 12)]],
    [[(0.35, 0.9), *_arc((0, -0.35), (0.5, 0.55), 150, 510, 18)]],
    [[(-0.6, 0.9), (0.6, 0.9), (-0.15, -0.9)]],
    [_arc((0, 0.45), (0.45, 0.45), -90, 270, 11), _arc((0, -0.45), (0.55, 0.45), 90, 450, 11)],
    [[*_arc((0, 0.4), (0.5, 0.5), -30, 330, 16), (0.35, -0.9)]],
)  # fmt: skip
"""Of the digits 0 to 9, as one writes them."""


def lines_of(digit: int) -> Floats:
    """The lines [L, 2, 2] of a digit, always as many."""
    found = [(begin, end) for stroke in _STROKES[digit] for begin, end in pairwise(stroke)]
    assert len(found) <= _MOST_LINES, (digit, len(found))
    found += [found[-1]] * (_MOST_LINES - len(found))
    return np.array(found, dtype=np.float32)


def draw(labels_B: NDArray[np.int64], rng: np.random.Generator, *, side: int) -> NDArray[np.uint8]:
    """Images [B, side, side] of digits, each in a hand of its own.

    Size, proportions, slant, turn, place, the ends of lines, the pen's width and the ink vary.

    Args:
        labels_B: the digits.
        rng: draws them all.
        side: pixels along each side.
    """
    lines_BL22 = _varied(np.stack([lines_of(int(label)) for label in labels_B]), rng)
    width_B = rng.uniform(0.9, 1.7, len(labels_B)).astype(np.float32)
    ink_B = rng.uniform(0.75, 1.0, len(labels_B)).astype(np.float32)
    # From the square to pixels: y points down in an image.
    scale = np.array([side / 2, -side / 2], np.float32)
    distance_BP = _distances(lines_BL22 * scale + side / 2, side)
    covered_BP = np.clip((width_B[:, None] - distance_BP) / _FADE + 0.5, 0, 1)
    drawn: NDArray[np.uint8] = np.rint(255 * ink_B[:, None] * covered_BP).astype(np.uint8)
    return drawn.reshape(-1, side, side)


def _varied(lines_BL22: Floats, rng: np.random.Generator) -> Floats:
    count = len(lines_BL22)

    def drawn(low: float, high: float) -> NDArray[np.float64]:
        return rng.uniform(low, high, count)

    turn, slant = np.radians(drawn(-14, 14)), drawn(-0.25, 0.25)
    wide, tall = drawn(0.5, 0.85), drawn(0.6, 0.8)
    turned_B22 = np.stack(
        [
            np.stack([np.cos(turn), -np.sin(turn)], axis=1),
            np.stack([np.sin(turn), np.cos(turn)], axis=1),
        ],
        axis=1,
    )
    shaped_B22 = np.zeros((count, 2, 2))
    shaped_B22[:, 0, 0], shaped_B22[:, 0, 1], shaped_B22[:, 1, 1] = wide, slant, tall
    # Waves bend strokes without tearing their lines apart.
    phase_B2, height_B2 = rng.uniform(0, 2 * np.pi, (count, 2)), rng.uniform(0, 0.09, (count, 2))
    along_BL22 = 3 * lines_BL22[..., ::-1] + phase_B2[:, None, None]
    waves_BL22 = height_B2[:, None, None] * np.sin(along_BL22)
    bent_BL22 = (lines_BL22 + waves_BL22) @ (turned_B22 @ shaped_B22).transpose(0, 2, 1)[:, None]
    shift_B2 = rng.uniform(-0.14, 0.14, (count, 2))
    return (bent_BL22 + shift_B2[:, None, None]).astype(np.float32)


def _distances(lines_BL22: Floats, side: int) -> Floats:
    """From the middle of each pixel [B, P], row by row, to the nearest line."""
    middles = np.arange(side, dtype=np.float32) + 0.5
    x_P, y_P = (grid.ravel() for grid in np.meshgrid(middles, middles))
    nearest_BP = np.full((len(lines_BL22), side * side), np.inf, np.float32)
    for line in range(lines_BL22.shape[1]):
        begin_B2 = lines_BL22[:, line, 0]
        along_B2 = lines_BL22[:, line, 1] - begin_B2
        # x and y apart: arrays of pairs would take several times as long.
        along_x_B1, along_y_B1 = along_B2[:, :1], along_B2[:, 1:]
        from_x_BP, from_y_BP = x_P - begin_B2[:, :1], y_P - begin_B2[:, 1:]
        share_BP = from_x_BP * along_x_B1
        share_BP += from_y_BP * along_y_B1
        share_BP /= np.maximum(along_x_B1**2 + along_y_B1**2, np.float32(1e-12))
        np.clip(share_BP, 0, 1, out=share_BP)
        from_x_BP -= share_BP * along_x_B1
        from_y_BP -= share_BP * along_y_B1
        from_x_BP *= from_x_BP
        from_y_BP *= from_y_BP
        from_x_BP += from_y_BP
        np.minimum(nearest_BP, from_x_BP, out=nearest_BP)
    return np.sqrt(nearest_BP)
