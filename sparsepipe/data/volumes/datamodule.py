"""LightningDataModule of signals, images and volumes, whole, in patches, or a part for each rank.

Shapes: B samples in a batch, S samples of a split, C channels, D spatial dimensions, K classes, P
voxels of a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch.utils.data import Dataset

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import Access
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.files import LOCK_WAIT_S, log_once
from sparsepipe.data.listing import named
from sparsepipe.data.points import IntArray
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.progress import progress

Labels = Literal["sample", "voxel"]
"""What has a label: each sample or each of its voxels."""
VolumePart: TypeAlias = tuple[slice, ...]
"""A part of a sample: a slice with start and stop for each spatial dimension."""
UNLABELLED = -100
"""Label that losses and metrics ignore, as PyTorch's cross-entropy does."""
_MOST_VOXELS = 10_000
"""Largest number of voxels of each class of a volume around which its patches are drawn."""
_SLAB_VOXELS = 1 << 20
"""Voxels whose labels are read at once where those of a whole volume are counted."""


class VolumeDataModule(SplitDataModule):
    """Data module of signals, images or volumes, for training, validation and test.

    A batch is ``dict(input=Tensor [B, C, *sizes], label=[B] or (of voxels) [B, *sizes],
    index=[B])``; ``index`` is that of the sample in its split. If the source reads files,
    ``spacing`` [B, D] has the sizes of voxels in mm, or NaN if they are unknown. The loaders read
    from a ``VolumeDataset``, which can be limited to a rank's part of each sample. Volumes of
    unlike sizes are padded at their ends to the largest sizes of both splits, with inputs of 0 and
    labels of -100.

    With ``patch``, training samples are patches instead, and volumes may have any sizes; those
    smaller than a patch are padded at both ends. Validation and test then read whole volumes, one
    at a time and not padded.

    Args:
        root: folder or csv file of the data, if the source reads files.
        source: class (or partial) called as ``source(root, labels=labels,
            cache=CacheSettings(...))``. A source has the names of its ``classes``, the largest
            spatial ``sample_sizes`` of its samples, ``fingerprint()``, a digest of the samples, and
            ``load(split)``, which returns samples with ``labels_S`` (0 if only voxels have labels),
            ``sizes_S``, the spatial sizes of each, ``read_input(index, part)``, float32 [C, *part],
            which holds no more than the part in memory, and ``read_label(index, part)``, int64
            [*part].
        cache_dir: directory in which generated, decompressed and prepared samples are cached.
        labels: what has a label, each ``sample`` or each ``voxel``.
        patch: sizes of a patch in voxels, one for each spatial dimension; None: samples are whole.
            Patches need labels of voxels.
        patches_per_volume: number of patches of each training volume in an epoch.
        batches_per_epoch: number of batches of each rank in an epoch; None: by the number of
            training volumes.
        balance: probability that a patch is around a random voxel of one of its volume's classes,
            all of which are equally probable; otherwise, all places are. In [0, 1].
        batch_size: as in ``ShapeDataModule``, like ``num_workers`` and ``seed``.
        val_share: share of the samples of every class (or of all samples, if only voxels have
            labels) kept for validation.
        cache_workers: number of processes that prepare samples; 0: one for each core.
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
        patch: Sequence[Count] | None = None,
        patches_per_volume: Count = 4,
        batches_per_epoch: Count | None = None,
        balance: Annotated[float, Field(ge=0, le=1)] = 0.5,
        batch_size: Count = 4,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
        cache_workers: CountFrom0 = 0,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        if patch is not None and labels == "sample":
            raise ConfigError(
                f"data.patch={list(patch)} needs labels of voxels, because a patch may not show "
                "what the label of its sample says",
                remedy="set data.labels=voxel, or data.patch=null",
            )
        self._labels: Labels = labels
        self.patch = None if patch is None else tuple(patch)
        self._patches_per_volume, self._batches_per_epoch = patches_per_volume, batches_per_epoch
        self._balance = balance
        self.eval_batch_size = None if patch is None else 1
        directory = expanded(cache_dir).absolute()
        self._cache = CacheSettings(
            directory=directory, workers=cache_workers, lock_wait_s=lock_wait_s
        )
        self._source = source(root, labels=labels, cache=self._cache)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of samples or of voxels, indexed by the labels."""
        return tuple(self._source.classes)

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of every training sample; raises a DataError for unreadable files."""
        return self.patch or tuple(self._source.sample_sizes)

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
            for label in _slabs(samples, index):
                counts_K += np.bincount(label[label >= 0], minlength=self.num_classes)
        return counts_K

    def recorded(self) -> dict[str, Any]:
        """Returns plain values from which a checkpoint prepares and reads other volumes alike."""
        preparation = getattr(self._source, "recorded_preparation", None)
        return {
            "classes": list(self.classes),
            "preparation": None if preparation is None else asdict(preparation),
            "patch": None if self.patch is None else list(self.patch),
            "sizes": None if self.patch else list(self.sample_sizes),
        }

    def setup(self, stage: str | None = None) -> None:
        """Opens both splits, and chooses the validation samples."""
        super().setup(stage)
        if self._batches_per_epoch is not None:
            ranks = self._ranks()["num_replicas"]
            self.epoch_samples = self._batches_per_epoch * self.batch_size * ranks
        elif self.patch is not None:
            self.epoch_samples = self._patches_per_volume * self.num_train
        if self.num_val and (files := getattr(self.samples("train"), "files", ())):
            log_once(f"cases for validation: {named([files[index] for index in self._val_S])}")
        sizes = {each for split in self._splits.values() for each in split.sizes_S}
        if self.patch is None and len(sizes) > 1:
            padded = " x ".join(map(str, self.sample_sizes))
            log_once(f"samples have {len(sizes)} sizes; smaller ones are padded to {padded}")

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> Dataset[dict[str, Any]]:
        samples = self.samples("test" if purpose == "test" else "train")
        if self.patch is None:
            return VolumeDataset(
                samples, indices_S, labels=self._labels, sample_sizes=self.sample_sizes
            )
        patch, voxels = self.patch if purpose == "train" else None, list[list[IntArray]]()
        if patch and self._balance:
            with progress("finding voxels of each class") as advance:
                for index in map(int, indices_S):
                    voxels.append(_voxels_of_classes(samples, index, self.num_classes))
                    advance(len(indices_S))
        return PatchDataset(samples, indices_S, patch, self._balance, voxels, self._seed)


class VolumeDataset(Dataset[dict[str, Any]]):
    """Whole samples ``indices_S`` of a split, read by (epoch, position in these) in any epoch.

    Samples that are smaller than ``sample_sizes`` are padded at their ends.
    """

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
        return _sample(self.samples, int(self.indices_S[position]), self._part, self.labels)


@dataclass(frozen=True, slots=True, eq=False)
class PatchDataset(Dataset[dict[str, Any]]):
    """A patch of each of the samples ``indices_S``, read by (epoch, position in these).

    The place of a patch depends only on ``seed``, the epoch and the sample. With the probability
    ``balance`` it is around one of ``voxels``: those of :func:`_voxels_of_classes` for each sample,
    or none. Without ``patch``, whole samples are read, of unlike sizes.
    """

    samples: Any
    indices_S: IntArray
    patch: tuple[int, ...] | None
    balance: float
    voxels: Sequence[Sequence[IntArray]]
    seed: int

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """Returns ``index``, ``input`` float32 [C, *patch], ``label`` int64 [*patch]."""
        epoch, position = access if isinstance(access, tuple) else (0, access)
        index = int(self.indices_S[position])
        sizes_D = np.array(self.samples.sizes_S[index])
        patch_D = sizes_D if self.patch is None else np.array(self.patch)
        rng = np.random.default_rng([self.seed, epoch, index])
        most_D = np.maximum(sizes_D - patch_D, 0)
        start_D = rng.integers(most_D, endpoint=True)
        of_classes = self.voxels[position] if self.voxels else ()
        if of_classes and rng.random() < self.balance:
            voxel = rng.choice(of_classes[int(rng.integers(len(of_classes)))])
            voxel_D = np.array(np.unravel_index(voxel, tuple(sizes_D)))
            start_D = np.clip(voxel_D - patch_D // 2, 0, most_D)
        start_D -= np.maximum(patch_D - sizes_D, 0) // 2
        box = tuple(map(slice, start_D.tolist(), (start_D + patch_D).tolist()))
        return _sample(self.samples, index, box, "voxel")


def _sample(samples: Any, index: int, box: VolumePart, labels: Labels) -> dict[str, Any]:
    """Reads a box of a sample, some or all of which may be padding outside of the sample."""
    inner, widths = list[slice](), list[tuple[int, int]]()
    for each, size in zip(box, samples.sizes_S[index], strict=True):
        inner.append(slice(*np.clip([each.start, each.stop], 0, size).tolist()))
        before = max(0, -each.start)
        missing = each.stop - each.start - (inner[-1].stop - inner[-1].start)
        widths.append((before, missing - before))

    def padded(values: NDArray[Any], value: int) -> NDArray[Any]:
        if not np.any(widths):
            return values
        return np.pad(values, [(0, 0)] * (values.ndim - len(box)) + widths, constant_values=value)

    label = np.asarray(samples.labels_S[index])
    if labels == "voxel":
        label = padded(samples.read_label(index, tuple(inner)), UNLABELLED)
    values = padded(samples.read_input(index, tuple(inner)), 0)
    found = {"input": values, "label": label, "index": index}
    spacings_S = getattr(samples, "spacings_S", None)
    return found if spacings_S is None else {**found, "spacing": spacings_S[index]}


def _slabs(samples: Any, index: int) -> Iterator[IntArray]:
    """Yields the labels of a sample's voxels in pieces, in the order of its first axis."""
    sizes = samples.sizes_S[index]
    rows = max(1, _SLAB_VOXELS // math.prod(sizes[1:]))
    for start in range(0, sizes[0], rows):
        first = slice(start, min(start + rows, sizes[0]))
        yield samples.read_label(index, (first, *(slice(0, size) for size in sizes[1:])))


def _voxels_of_classes(samples: Any, index: int, num_classes: int) -> list[IntArray]:
    """Returns, for each class that a sample has, flat indices [P] of up to 10,000 random voxels."""
    rng, before = np.random.default_rng(0), 0
    kept = [np.empty((2, 0)) for _ in range(num_classes)]  # of each voxel, a random key and place
    for label in map(np.ravel, _slabs(samples, index)):
        for number in np.flatnonzero(np.bincount(label[label >= 0], minlength=num_classes)):
            places = np.flatnonzero(label == number)
            both = np.hstack([kept[number], [rng.random(len(places)), before + places]])
            last = min(_MOST_VOXELS, both.shape[1]) - 1
            kept[number] = both[:, np.argpartition(both[0], last)[: last + 1]]
        before += label.size
    return [each[1].astype(np.int64) for each in kept if each.size]
