"""The LightningDataModule of images.

Shapes: B images in a batch, S of a split, H x W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparsepipe.data.dataloaders import Access, ShapeLoader
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.images.shifts import ImageShift
from sparsepipe.data.images.sources import DIGITS, ImageSet, ImageSource
from sparsepipe.data.points import SPLITS, IntArray, Split
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed
from sparsepipe.utils.files import expanded


class ImageDataModule(SplitDataModule):
    """Images, such as those of digits, for training, validation and test.

    A batch is ``dict(input=Tensor [B, C, H, W] in [0, 1], label=[B], index=[B])``, where C is that
    of the source unless a shift has more channels; ``index`` is the image's position in its split.

    Args:
        root: directory of the data, if the source reads files.
        source: class (or partial) called with ``root``.
        cache_dir: directory of drawn and of resized images.
        shift: what makes another domain of the images, if anything.
        batch_size: as in ``ShapeDataModule``.
        num_workers: likewise.
        val_share: likewise.
        seed: likewise.

    Raises:
        ConfigError: a setting is out of its range.
        DataError: files are missing.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        source: Callable[[Path | str | None], ImageSource],
        cache_dir: Path | str,
        shift: ImageShift | None = None,
        batch_size: Count = 32,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        self._source = source(root)
        self.classes: tuple[str, ...] = getattr(self._source, "classes", DIGITS)
        """Class names; labels index them."""
        self._shift = shift
        self._cache = expanded(cache_dir).absolute()
        self._splits: dict[Split, ImageSet] = {}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def in_channels(self) -> int:
        """Channels of an image."""
        return len(self._dataset("train", np.zeros(1, np.int64))[0]["image"])

    def fingerprint(self) -> str:
        """Digest of the images, independent of their location on the disk."""
        return self._source.fingerprint()

    def image_set(self, split: Split) -> ImageSet:
        """The images of ``train`` (with validation) or ``test``."""
        if split not in self._splits:
            self._splits[split] = self._source.load(split, self._cache)
        return self._splits[split]

    def test_names(self) -> Sequence[str]:
        """The file of each test image, or its number where images share files."""
        return self.image_set("test").files or super().test_names()

    def _open(self, split: Split) -> None:
        self.image_set(split)

    def test_dataloader(self) -> ShapeLoader:
        """The test split; no rank repeats an image.

        Raises:
            ConfigError: no test images exist.
        """
        if not len(self.image_set("test")):
            raise ConfigError(
                "these data have no images to test on",
                remedy="set data.source.held_out=2000 to test on the last 2,000 rows of train.csv, "
                "or task.test=false",
            )
        return super().test_dataloader()

    def _labels_S(self, split: Split) -> IntArray:
        return self.image_set(split).labels_S

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> ImageDataset:
        split: Split = "test" if purpose == "test" else "train"
        return ImageDataset(self.image_set(split), indices_S, shift=self._shift, split=split)

    def _collate(self) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
        return collate


class ImageDataset(Dataset[dict[str, Any]]):
    """Some images of a split, indexed by (epoch, index); the epoch has no effect.

    Args:
        images: all images of the split.
        indices_S: indices of the images in this data set.
        shift: what is done to each image.
        split: that the images are of.
    """

    def __init__(
        self,
        images: ImageSet,
        indices_S: IntArray,
        *,
        shift: ImageShift | None = None,
        split: Split = "train",
    ) -> None:
        self.images, self.indices_S = images, indices_S
        self._shift, self._split = shift, SPLITS.index(split)

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """``image`` float32 [C, H, W], ``label`` and ``index``."""
        position = access[1] if isinstance(access, tuple) else access
        index = int(self.indices_S[position])
        label, image = int(self.images.labels_S[index]), self.images.image(index)
        if self._shift is not None:
            image = self._shift(image, split=self._split, index=index)
        return {"image": image, "label": label, "index": index}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``input`` [B, C, H, W], ``label`` [B] and ``index`` [B]."""
    batch: dict[str, Any] = {
        name: torch.tensor([sample[name] for sample in samples], dtype=torch.int64)
        for name in ("label", "index")
    }
    batch["input"] = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
    return batch
