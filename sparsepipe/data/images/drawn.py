"""Digits that are drawn here: images to learn from without a download."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.checks import check_numbers
from sparsepipe.data.files import digest_values, explaining_storage
from sparsepipe.data.images.base import SIDE, ImageSet
from sparsepipe.data.images.strokes import draw
from sparsepipe.data.lock import locked
from sparsepipe.data.points import SPLITS, MappedArray, Split
from sparsepipe.data.sources.base import LOCK_WAIT_S
from sparsepipe.utils.files import replacing

_VERSION = 1
"""Raised with any change to what is drawn."""
_AT_ONCE = 100
"""Images that are drawn together."""


class DrawnDigits:
    """Source: digits 0 to 9 as strokes of a pen, each image in another hand.

    Deterministic: an image follows from the seed, its split and its place. Digits take turns, so
    that classes are equally frequent. They are drawn once, into the cache.

    Args:
        root: of no use; there is nothing to read.
        train_images: how many to train on; by default as many as Zhang and Sun have.
        test_images: how many to test on.
        seed: of the hands.

    Raises:
        ConfigError: no images, or a negative seed.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        train_images: int = 42_000,
        test_images: int = 10_000,
        seed: int = 0,
    ) -> None:
        del root
        check_numbers(
            least_1={"source.train_images": train_images, "source.test_images": test_images},
            least_0={"source.seed": seed},
        )
        self._counts = {"train": train_images, "test": test_images}
        self._seed = seed

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """The images of a split; see ``ImageSource.load``."""
        labels_S = np.arange(self._counts[split], dtype=np.int64) % 10
        digest = digest_values([_VERSION, self._counts[split], self._seed])
        path = cache_directory / "drawn_digits" / f"{split}_{digest}.npy"
        if not path.is_file():
            with (
                explaining_storage(cache_directory, setting="data.cache_dir"),
                locked(path.with_suffix(".lock"), wait_s=LOCK_WAIT_S),
            ):
                if not path.is_file():
                    self._draw(split, labels_S, path)
        return ImageSet(MappedArray(path), labels_S)

    def fingerprint(self) -> str:
        """Digest of what is drawn; see ``ImageSource.fingerprint``."""
        return digest_values([_VERSION, self._counts, self._seed])

    def _draw(self, split: Split, labels_S: NDArray[np.int64], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.empty((len(labels_S), SIDE, SIDE), np.uint8)
        for first in range(0, len(labels_S), _AT_ONCE):
            rng = np.random.default_rng([self._seed, SPLITS.index(split), first // _AT_ONCE])
            whole_block = np.arange(first, first + _AT_ONCE) % 10  # or the last would differ
            some = images[first : first + _AT_ONCE]
            some[:] = draw(whole_block, rng, side=SIDE)[: len(some)]
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.save(file, images)
            file.flush()
            os.fsync(file.fileno())
