"""Shifts, which turn images into those of another domain, an image always in the same way.

Shapes: H x W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import ndimage

from sparsepipe.utils.arguments import Count, Seed, checked

Image = NDArray[np.float32]
_Draw = Callable[[Image, Generator], Image]


# fmt: off
ImageShiftKind = Literal[
    "none", "blended", "inverted", "noisy", "blurred", "thick", "slanted", "low_resolution",
    "coloured",
]
# fmt: on


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShift:
    """Turns images into those of another domain; random draws depend on seed, split and index.

    Args:
        kind: a key of :data:`SHIFTS`; ``none`` leaves images as they are.
        channels: C of the result; an image with another number of channels is averaged over them
            and repeated C times.
        seed: seed of the random draws.
    """

    kind: ImageShiftKind = "none"
    channels: Count = 1
    seed: Seed = 0

    def __call__(self, image: Image, *, split: int, index: int) -> Image:
        """Returns the shifted image [C, H, W] in [0, 1]; ``split`` is 0 (train) or 1 (test)."""
        rng = np.random.default_rng([self.seed, split, index])
        image_CHW = image
        if len(image) != self.channels:
            grey = image.mean(axis=0, keepdims=True, dtype=np.float32)
            image_CHW = np.repeat(grey, self.channels, axis=0)
        shifted: Image = np.clip(SHIFTS[self.kind](image_CHW, rng), 0, 1, dtype=np.float32)
        return shifted


def _blurred(image: Image, rng: Generator) -> Image:
    blurred: Image = ndimage.gaussian_filter(image, (0, 1.6, 1.6))
    return blurred / max(float(blurred.max()), 1e-6)


def _slanted(image: Image, rng: Generator) -> Image:
    shear = rng.choice((-1.0, 1.0)) * rng.uniform(0.6, 0.9)
    middle = (image.shape[1] - 1) / 2
    matrix = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, shear, 1.0]])
    slanted: Image = ndimage.affine_transform(
        image, matrix, offset=(0, 0, -shear * middle), order=1
    )
    return slanted


def _low_resolution(image: Image, rng: Generator) -> Image:
    """Replaces each block of 4 x 4 pixels with its mean; one or two last lines may become 0."""
    means = ndimage.uniform_filter(image, (0, 4, 4))
    coarse = means[:, 2::4, 2::4]
    fine = coarse.repeat(4, axis=1).repeat(4, axis=2)
    shifted = np.zeros_like(image)
    height, width = (min(a, b) for a, b in zip(fine.shape[1:], image.shape[1:], strict=True))
    shifted[:, :height, :width] = fine[:, :height, :width]
    return shifted


def _blended(image: Image, rng: Generator) -> Image:
    """Returns the absolute difference from a drawn texture; MNIST-M takes photographs instead.

    The texture [C, H, W] in [0, 1] mixes two colours, by smoothed noise and a wave.
    """
    channels, *sides = image.shape
    rough = ndimage.gaussian_filter(rng.standard_normal(sides), rng.uniform(0.8, 2.5))
    places = np.indices(sides).astype(np.float32)
    turn = rng.uniform(0, 2 * np.pi)
    along = places[0] * np.cos(turn) + places[1] * np.sin(turn)
    waves = np.sin(2 * np.pi * along / rng.uniform(4, 12) + rng.uniform(0, 2 * np.pi))
    mixed = rough / max(float(rough.std()), 1e-6) + rng.uniform(0, 1.5) * waves
    share = 1 / (1 + np.exp(-2 * mixed))
    dark, light = (rng.uniform(0, 1, (channels, 1, 1)) for _ in range(2))
    texture: Image = (dark + (light - dark) * share).astype(np.float32)
    blended: Image = np.abs(texture - image)
    return blended


def _coloured(image: Image, rng: Generator) -> Image:
    """Paints the image in one colour on another; their brightness differs by at least a third."""
    channels = image.shape[0]
    while True:
        paper, ink = (rng.uniform(0, 1, (channels, 1, 1)) for _ in range(2))
        if abs(float(paper.mean() - ink.mean())) >= 1 / 3:
            return (paper + (ink - paper) * image).astype(np.float32)


SHIFTS: dict[ImageShiftKind, _Draw] = {
    "none": lambda image, rng: image,
    "blended": _blended,
    "inverted": lambda image, rng: 1 - image,
    "noisy": lambda image, rng: (
        image + np.float32(0.35) * rng.standard_normal(image.shape[1:], np.float32)
    ),
    "blurred": _blurred,
    "thick": lambda image, rng: ndimage.grey_dilation(image, size=(1, 4, 4)),
    "slanted": _slanted,
    "low_resolution": _low_resolution,
    "coloured": _coloured,
}
