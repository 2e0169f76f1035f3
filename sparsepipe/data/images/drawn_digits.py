"""Digits that are drawn as strokes of a pen.

Shapes: S images of a split, B images drawn at once, L straight lines of a digit, P pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.cache import build_once
from sparsepipe.data.files import digest_values
from sparsepipe.data.images.datamodule import DIGITS, ImageSet
from sparsepipe.data.points import SPLITS, MappedArray, Split
from sparsepipe.utils.arguments import Count, Seed, checked
from sparsepipe.utils.files import replacing

SIDE = 28
"""Pixels along each side of an image."""
Floats = NDArray[np.float32]
Point = tuple[float, float]

_MAX_LINES = 24
"""Number of lines stored for every digit, whose last line is repeated if it has fewer."""
_FADE = 1.0
"""Width in pixels of the blurred edge of a stroke."""


def _arc(
    center: Point, radii: Point, from_deg: float, to_deg: float, lines: int = 10
) -> list[Point]:
    """Returns ``lines + 1`` points of an arc, anticlockwise if ``to_deg`` exceeds ``from_deg``."""
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
"""Strokes of the digits 0 to 9, as points of a path each, in the square [-1, 1]^2."""


_LINES = [[pair for stroke in strokes for pair in pairwise(stroke)] for strokes in _STROKES]
LINES_DL22 = np.array(
    [lines + lines[-1:] * (_MAX_LINES - len(lines)) for lines in _LINES], dtype=np.float32
)
"""Both ends (x, y) of the L lines of each digit D."""


def draw(labels_B: NDArray[np.int64], rng: np.random.Generator, *, side: int) -> NDArray[np.uint8]:
    """Draws images [B, side, side] of the digits ``labels_B`` in randomly varied handwriting.

    Size, proportions, slant, rotation, position, curvature, pen width and ink vary.
    """
    lines_BL22, count = LINES_DL22[labels_B], len(labels_B)
    turn, slant = np.radians(rng.uniform(-14, 14, count)), rng.uniform(-0.25, 0.25, count)
    wide, tall = rng.uniform(0.5, 0.85, count), rng.uniform(0.6, 0.8, count)
    turned_B22 = np.stack(
        [
            np.stack([np.cos(turn), -np.sin(turn)], axis=1),
            np.stack([np.sin(turn), np.cos(turn)], axis=1),
        ],
        axis=1,
    )
    shaped_B22 = np.zeros((count, 2, 2))
    shaped_B22[:, 0, 0], shaped_B22[:, 0, 1], shaped_B22[:, 1, 1] = wide, slant, tall
    # Smooth waves bend strokes and keep consecutive lines connected.
    phase_B2, height_B2 = rng.uniform(0, 2 * np.pi, (count, 2)), rng.uniform(0, 0.09, (count, 2))
    along_BL22 = 3 * lines_BL22[..., ::-1] + phase_B2[:, None, None]
    waves_BL22 = height_B2[:, None, None] * np.sin(along_BL22)
    bent_BL22 = (lines_BL22 + waves_BL22) @ (turned_B22 @ shaped_B22).transpose(0, 2, 1)[:, None]
    shift_B2 = rng.uniform(-0.14, 0.14, (count, 2))
    varied_BL22 = (bent_BL22 + shift_B2[:, None, None]).astype(np.float32)
    width_B = rng.uniform(0.9, 1.7, len(labels_B)).astype(np.float32)
    ink_B = rng.uniform(0.75, 1.0, len(labels_B)).astype(np.float32)
    # From the square [-1, 1]^2 to pixels, where y points down.
    scale = np.array([side / 2, -side / 2], np.float32)
    distance_BP = _distances(varied_BL22 * scale + side / 2, side)
    covered_BP = np.clip((width_B[:, None] - distance_BP) / _FADE + 0.5, 0, 1)
    drawn: NDArray[np.uint8] = np.rint(255 * ink_B[:, None] * covered_BP).astype(np.uint8)
    return drawn.reshape(-1, side, side)


def _distances(lines_BL22: Floats, side: int) -> Floats:
    """Returns each pixel centre's distance [B, P], in pixels, to the nearest line of its digit."""
    middles = np.arange(side, dtype=np.float32) + 0.5
    x_P, y_P = (grid.ravel() for grid in np.meshgrid(middles, middles))
    nearest_BP = np.full((len(lines_BL22), side * side), np.inf, np.float32)
    for line in range(lines_BL22.shape[1]):
        begin_B2 = lines_BL22[:, line, 0]
        along_B2 = lines_BL22[:, line, 1] - begin_B2
        # x and y separately: arrays of pairs would take several times as long.
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


_VERSION = 1
"""Increased with any change to the drawn images."""
_BLOCK_IMAGES = 100
"""Number of images drawn at once, from one random generator."""


class DrawnDigits:
    """Source: digits 0 to 9 drawn as strokes of a pen, in varying handwriting.

    An image depends only on the seed, its split and its index. The digits alternate, so that all
    classes are equally frequent. Images are drawn once, into the cache.

    Args:
        root: ignored, because nothing is read.
        train_images: number of training images; by default as many as Zhang and Sun use.
        test_images: number of test images.
        seed: seed of all images.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None = None,
        *,
        train_images: Count = 42_000,
        test_images: Count = 10_000,
        seed: Seed = 0,
    ) -> None:
        del root
        self._counts = {"train": train_images, "test": test_images}
        self._seed = seed

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """Returns the images of a split, after drawing them into the cache if necessary."""
        labels_S = np.arange(self._counts[split], dtype=np.int64) % len(DIGITS)
        digest = digest_values([_VERSION, self._counts[split], self._seed])
        path = cache_directory / "drawn_digits" / f"{split}_{digest}.npy"

        def draw_all() -> None:
            images = np.empty((len(labels_S), SIDE, SIDE), np.uint8)
            for first in range(0, len(labels_S), _BLOCK_IMAGES):
                block_seed = [self._seed, SPLITS.index(split), first // _BLOCK_IMAGES]
                # A whole block is drawn, since a part's images would depend on its length.
                labels_B = np.arange(first, first + _BLOCK_IMAGES) % len(DIGITS)
                block = images[first : first + _BLOCK_IMAGES]
                drawn = draw(labels_B, np.random.default_rng(block_seed), side=SIDE)
                block[:] = drawn[: len(block)]
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, images)

        build_once(path, draw_all)
        return ImageSet(MappedArray(path), labels_S)

    def fingerprint(self) -> str:
        """Hex digest of the settings, which determine the images."""
        return digest_values([_VERSION, self._counts, self._seed])
