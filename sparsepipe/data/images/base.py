"""What a source of images is.

Shapes: S images of a split, 28 rows of 28 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.points import MappedArray, Split

SIDE = 28
"""Pixels along each side."""
DIGITS = tuple("0123456789")


@dataclass(frozen=True, slots=True)
class ImageSet:
    """The images of one split.

    Attributes:
        images: uint8 [S, 28, 28], 0 where there is no ink; in memory or by memory map.
        labels_S: int64 [S], the digit.
    """

    images: NDArray[Any] | MappedArray
    labels_S: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels_S)

    def image(self, index: int) -> NDArray[np.float32]:
        """float32 [1, 28, 28] in [0, 1]."""
        images = self.images.array if isinstance(self.images, MappedArray) else self.images
        found: NDArray[np.float32] = images[index][None].astype(np.float32) / np.float32(255)
        return found


class ImageSource(Protocol):
    """A place that images come from, for both splits."""

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """The images of a split, made ready in the cache first where needed.

        Raises:
            DataError: they are missing, or broken.
        """
        ...

    def fingerprint(self) -> str:
        """Hex digest of what there is, the same wherever it lies on the disk."""
        ...
