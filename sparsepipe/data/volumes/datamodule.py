"""The LightningDataModule of signals, images and volumes, each rank of which may read a part.

Shapes: B samples in a batch, S of a split, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import Access, ShapeLoader
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.files import LOCK_WAIT_S
from sparsepipe.data.points import IntArray, Split
from sparsepipe.data.volumes.samples import (
    Labels,
    Samples,
    VolumeSource,
    checked_part,
    whole_part,
)
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded


class VolumeDataModule(SplitDataModule):
    """Signals, images or volumes, for training, validation and test.

    A batch is ``dict(input=Tensor [B, C, *sizes], label=[B] or [B, *sizes], index=[B])``; ``index``
    is the sample's position in its split. The data sets of its loaders are ``VolumeDataset``, of
    which a rank may read its part only.

    Args:
        root: of the data, if the source reads files.
        source: class (or partial) of a ``VolumeSource``, called as
            ``source(root, labels=labels, cache=CacheSettings(...))``.
        cache_dir: directory of generated and decompressed samples.
        labels: what has a label, each ``sample`` or each ``voxel``.
        batch_size: as in ``ShapeDataModule``.
        num_workers: likewise.
        val_share: likewise; of every class's samples, or of all where only voxels have labels.
        seed: likewise.
        lock_wait_s: how long to wait for another process that writes the same samples.

    Raises:
        ConfigError: a setting is out of its range.
        DataError: files are missing.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None = None,
        *,
        source: Callable[..., VolumeSource],
        cache_dir: Path | str,
        labels: Labels = "sample",
        batch_size: Count = 4,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        self._labels: Labels = labels
        cache = CacheSettings(
            directory=expanded(cache_dir).absolute(),
            lock_wait_s=lock_wait_s,
        )
        self._source = source(root, labels=labels, cache=cache)
        self._splits: dict[Split, Samples] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of samples, or of voxels."""
        return self._source.classes

    @property
    def num_classes(self) -> int:
        """Their number."""
        return len(self.classes)

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of every whole sample.

        Raises:
            DataError: no files exist, or the first one is broken.
        """
        return self._source.sample_sizes

    @property
    def in_channels(self) -> int:
        """Channels of a sample."""
        nothing = (slice(0, 0),) * len(self.sample_sizes)
        return len(self.samples("train").read_input(0, nothing))

    def fingerprint(self) -> str:
        """Digest of the samples, independent of their location on the disk."""
        return self._source.fingerprint()

    def samples(self, split: Split) -> Samples:
        """The samples of ``train`` (with validation) or ``test``."""
        if split not in self._splits:
            self._splits[split] = self._source.load(split)
        return self._splits[split]

    def test_dataloader(self) -> ShapeLoader:
        """The test split; no rank repeats a sample.

        Raises:
            ConfigError: no test samples exist.
        """
        if not len(self._labels_S("test")):
            raise ConfigError(
                "these data have no samples to test on",
                remedy="put some into the folders test, or mark rows of the csv as split=test; "
                "or set task.test=false",
            )
        return super().test_dataloader()

    def test_names(self) -> Sequence[str]:
        """The file of each test sample, or its number where samples have none."""
        return getattr(self.samples("test"), "files", ()) or super().test_names()

    def _open(self, split: Split) -> None:
        self.samples(split)

    def _labels_S(self, split: Split) -> IntArray:
        return self.samples(split).labels_S

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> VolumeDataset:
        return VolumeDataset(
            self.samples("test" if purpose == "test" else "train"),
            indices_S,
            labels=self._labels,
            sample_sizes=self.sample_sizes,
        )

    def _collate(self) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
        return collate


class VolumeDataset(Dataset[dict[str, Any]]):
    """Some samples of a split, indexed by (epoch, index); the epoch has no effect.

    Args:
        samples: all samples of the split.
        indices_S: indices of the samples in this data set.
        labels: what has a label, each ``sample`` or each ``voxel``.
        sample_sizes: spatial sizes of each whole sample.
    """

    def __init__(
        self,
        samples: Samples,
        indices_S: IntArray,
        *,
        labels: Labels,
        sample_sizes: tuple[int, ...],
    ) -> None:
        self.samples, self.indices_S, self.labels = samples, indices_S, labels
        self.sample_sizes = sample_sizes
        self._part = whole_part(sample_sizes)

    def read_part(self, slices: tuple[slice, ...]) -> None:
        """Read only a part of the spatial dimensions from now on, of inputs and labels of voxels.

        Call it before a loader makes an iterator: worker processes get the data set as it is then.

        Args:
            slices: of the whole sample, one for each spatial dimension; a part may be empty.

        Raises:
            ConfigError: the slices are no part of a sample.
        """
        self._part = checked_part(slices, self.sample_sizes)

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """``input`` float32 [C, *part], ``label`` int64 [] or [*part], and ``index``.

        Raises:
            DataError: a file is missing or broken.
        """
        position = access[1] if isinstance(access, tuple) else access
        index = int(self.indices_S[position])
        if self.labels == "voxel":
            label = self.samples.read_label(index, self._part)
        else:
            label = np.asarray(self.samples.labels_S[index])
        return {"input": self.samples.read_input(index, self._part), "label": label, "index": index}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``input`` [B, C, *part], ``label`` [B] or [B, *part] and ``index`` [B]."""
    return {
        "input": _stacked([sample["input"] for sample in samples]),
        "label": _stacked([sample["label"] for sample in samples]),
        "index": torch.tensor([sample["index"] for sample in samples], dtype=torch.int64),
    }


def _stacked(arrays: Sequence[Any]) -> Tensor:
    """One tensor of all arrays; a batch of one large sample is not copied."""
    stacked = arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
    return torch.from_numpy(stacked)
