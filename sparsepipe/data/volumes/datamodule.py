"""LightningDataModule of signals, images and volumes; a rank may read a part of each sample.

Shapes: B samples in a batch, S samples of a split, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import Access
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.files import LOCK_WAIT_S
from sparsepipe.data.points import IntArray
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded

Labels = Literal["sample", "voxel"]
"""What has a label: each sample or each of its voxels."""
VolumePart: TypeAlias = tuple[slice, ...]
"""A part of a sample: a slice with start and stop for each spatial dimension."""


class VolumeDataModule(SplitDataModule):
    """Data module of signals, images or volumes, for training, validation and test.

    A batch is ``dict(input=Tensor [B, C, *sizes], label=[B] or (of voxels) [B, *sizes],
    index=[B])``; ``index`` is that of the sample in its split. The loaders read from a
    ``VolumeDataset``, which can be limited to a rank's part of each sample.

    Args:
        root: folder or csv file of the data, if the source reads files.
        source: class (or partial) called as ``source(root, labels=labels,
            cache=CacheSettings(...))``. A source has the names of its ``classes``, the spatial
            ``sample_sizes`` of every sample, ``fingerprint()``, a digest of the samples, and
            ``load(split)``, which returns samples with ``labels_S`` (0 if only voxels have
            labels), ``read_input(index, part)``, float32 [C, *part], which holds no more than the
            part in memory, and ``read_label(index, part)``, int64 [*part].
        cache_dir: directory in which generated and decompressed samples are cached.
        labels: what has a label, each ``sample`` or each ``voxel``.
        batch_size: as in ``ShapeDataModule``, like ``num_workers`` and ``seed``.
        val_share: share of the samples of every class (or of all samples, if only voxels have
            labels) kept for validation.
        lock_wait_s: seconds to wait for another process that writes the same samples to the cache.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None = None,
        *,
        source: Callable[..., Any],
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
        cache = CacheSettings(directory=expanded(cache_dir).absolute(), lock_wait_s=lock_wait_s)
        self._source = source(root, labels=labels, cache=cache)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of samples or of voxels, indexed by the labels."""
        return tuple(self._source.classes)

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Spatial sizes, the same for every sample; raises a DataError for unreadable files."""
        return tuple(self._source.sample_sizes)

    @property
    def input_kind(self) -> str:
        """Kind of the inputs, such as ``dense 3D``."""
        return f"dense {len(self.sample_sizes)}D"

    @property
    def in_channels(self) -> int:
        """Number of channels of a sample's input."""
        nothing = (slice(0, 0),) * len(self.sample_sizes)
        return len(self.samples("train").read_input(0, nothing))

    def class_counts(self) -> IntArray:
        """Returns the number of labels of each class in the split train, int64 [K]."""
        if self._labels == "sample":
            return super().class_counts()
        counts_K, samples = np.zeros(self.num_classes, np.int64), self.samples("train")
        for index in range(len(samples.labels_S)):
            label = samples.read_label(index, tuple(map(slice, self.sample_sizes)))
            counts_K += np.bincount(label[label >= 0], minlength=self.num_classes)
        return counts_K

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> VolumeDataset:
        samples = self.samples("test" if purpose == "test" else "train")
        return VolumeDataset(
            samples, indices_S, labels=self._labels, sample_sizes=self.sample_sizes
        )


class VolumeDataset(Dataset[dict[str, Any]]):
    """Samples ``indices_S`` of a split, read by (epoch, position in these); ignores the epoch."""

    def __init__(
        self,
        samples: Any,
        indices_S: IntArray,
        *,
        labels: Labels,
        sample_sizes: tuple[int, ...],
    ) -> None:
        self.samples, self.indices_S, self.labels = samples, indices_S, labels
        self.sample_sizes = sample_sizes
        self._part = tuple(slice(0, size) for size in sample_sizes)

    def read_part(self, slices: Sequence[slice]) -> None:
        """Limits reading of inputs and voxel labels to a slice of each spatial dimension.

        Must be called before a loader creates its iterator, because that copies it to the workers.
        """
        part = list[slice]()
        for each, size in zip(slices, self.sample_sizes, strict=True):
            start, stop = each.start or 0, size if each.stop is None else each.stop
            if not 0 <= start <= stop <= size or each.step not in (None, 1):
                raise ValueError(f"{each} is not a slice with step 1 from 0 to at most {size}")
            part.append(slice(start, stop))
        self._part = tuple(part)

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """Returns ``index``, ``input`` float32 [C, *part], ``label`` int64, [] or [*part]."""
        position = access[1] if isinstance(access, tuple) else access
        index = int(self.indices_S[position])
        if self.labels == "voxel":
            label = self.samples.read_label(index, self._part)
        else:
            label = np.asarray(self.samples.labels_S[index])
        return {"input": self.samples.read_input(index, self._part), "label": label, "index": index}
