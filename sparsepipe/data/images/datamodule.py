"""The LightningDataModule of images.

Shapes: B images in a batch, S of a split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from sparsepipe.data.checks import check_numbers, check_share
from sparsepipe.data.dataloaders import (
    Access,
    EvalSampler,
    ShapeLoader,
    TrainSampler,
    default_workers,
    make_loader,
    split_validation,
)
from sparsepipe.data.images.base import DIGITS, ImageSet, ImageSource
from sparsepipe.data.points import SPLITS, IntArray, Split
from sparsepipe.errors import ConfigError


class ImageDataModule(pl.LightningDataModule):
    """Images of digits, for training, validation and test.

    A batch is ``dict(input=Tensor [B, 1, 28, 28] in [0, 1], label=[B], index=[B])``, of which
    ``index`` is the image's place in its split. The order of an epoch follows from (seed, epoch)
    alone; training ranks get equal numbers of images, as of shapes.

    Args:
        root: directory of the data, where they are files.
        source: class (or partial) called with ``root``.
        cache_dir: where what is drawn is kept.
        batch_size: images in a batch, for each device.
        num_workers: loader processes for each rank; None chooses by the number of cores.
        val_share: share of every class's training images kept for validation, in [0, 1).
        seed: of the order and of the validation split.

    Raises:
        ConfigError: a setting is out of its range.
        DataError: files are missing.
    """

    classes = DIGITS
    num_classes = len(DIGITS)

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        source: Callable[[Path | str | None], ImageSource],
        cache_dir: Path | str,
        batch_size: int = 32,
        num_workers: int | None = None,
        val_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_share(val_share)
        check_numbers(
            least_1={"batch_size": batch_size}, least_0={"num_workers": num_workers, "seed": seed}
        )
        self._source = source(root)
        self._cache = Path(os.path.expandvars(cache_dir)).expanduser().absolute()
        self.batch_size, self._val_share, self._seed = batch_size, val_share, seed
        self._num_workers = default_workers() if num_workers is None else num_workers
        self._splits: dict[Split, ImageSet] = {}
        self._train_S: IntArray = np.empty(0, np.int64)
        self._val_S: IntArray = np.empty(0, np.int64)

    def fingerprint(self) -> str:
        """Digest of the images, the same wherever they lie on the disk."""
        return self._source.fingerprint()

    def image_set(self, split: Split) -> ImageSet:
        """The images of ``train`` (with validation) or ``test``."""
        if split not in self._splits:
            self._splits[split] = self._source.load(split, self._cache)
        return self._splits[split]

    def prepare_data(self) -> None:
        """Draw what is to be drawn; call it in one process only."""
        for split in SPLITS:
            self.image_set(split)

    def setup(self, stage: str | None = None) -> None:
        """Open the images and carve out the validation split."""
        del stage  # opening is cheap
        self.prepare_data()
        self._train_S, self._val_S = split_validation(
            self.image_set("train").labels_S, share=self._val_share, seed=self._seed
        )

    def train_dataloader(self) -> ShapeLoader:
        """Shuffled training images; every rank gets the same number."""
        dataset = ImageDataset(self.image_set("train"), self._train_S)
        return self._loader(dataset, TrainSampler(dataset, seed=self._seed, **self._ranks()))

    def val_dataloader(self) -> ShapeLoader | list[ShapeLoader]:
        """The validation split, or no loader when ``val_share`` is 0."""
        if not len(self._val_S):
            return []
        dataset = ImageDataset(self.image_set("train"), self._val_S)
        return self._loader(dataset, EvalSampler(dataset, **self._ranks()))

    def test_dataloader(self) -> ShapeLoader:
        """The test split; no rank repeats an image.

        Raises:
            ConfigError: there is none.
        """
        images = self.image_set("test")
        if not len(images):
            raise ConfigError(
                "these data have no images to test on",
                remedy="set data.source.held_out=2000 to test on the last rows of train.csv, or "
                "task.test=false",
            )
        dataset = ImageDataset(images, np.arange(len(images)))
        return self._loader(dataset, EvalSampler(dataset, **self._ranks()))

    def predict_dataloader(self) -> ShapeLoader:
        """The test split, read exactly as for testing."""
        return self.test_dataloader()

    def _loader(self, dataset: ImageDataset, sampler: TrainSampler | EvalSampler) -> ShapeLoader:
        return make_loader(
            dataset,
            sampler=sampler,
            batch_size=self.batch_size,
            num_workers=self._num_workers,
            collate=collate,
        )

    def _ranks(self) -> dict[str, int]:
        """This process's share, from the trainer where there is one."""
        told: dict[str, Any] = (
            (self.trainer.distributed_sampler_kwargs or {}) if self.trainer is not None else {}
        )
        return {"num_replicas": told.get("num_replicas", 1), "rank": told.get("rank", 0)}


class ImageDataset(Dataset[dict[str, Any]]):
    """Some images of a split, indexed by (epoch, index); the epoch changes nothing.

    Args:
        images: of the split.
        indices_S: those that belong to this data set.
    """

    def __init__(self, images: ImageSet, indices_S: IntArray) -> None:
        self.images, self.indices_S = images, indices_S

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """``image`` float32 [1, 28, 28], ``label`` and ``index``."""
        position = access[1] if isinstance(access, tuple) else access
        index = int(self.indices_S[position])
        label = int(self.images.labels_S[index])
        return {"image": self.images.image(index), "label": label, "index": index}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``input`` [B, 1, 28, 28], ``label`` [B] and ``index`` [B]."""
    batch: dict[str, Any] = {
        name: torch.tensor([sample[name] for sample in samples], dtype=torch.int64)
        for name in ("label", "index")
    }
    batch["input"] = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
    return batch
