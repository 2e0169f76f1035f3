"""Source of generated signals, images and volumes, written once into the cache.

Shapes: S samples of a split, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from sparsepipe.data.cache import CacheSettings, build_once
from sparsepipe.data.files import digest_values, new_array
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, MappedArray, Split
from sparsepipe.data.volumes.datamodule import Labels, VolumePart
from sparsepipe.data.volumes.drawing import (
    MIDDLE,
    STEP,
    TEXTURES,
    VERSION,
    draw_labels,
    draw_objects,
    paint_channel,
)
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Count, Seed, checked
from sparsepipe.utils.progress import progress

_PIECE_VOXELS = 1 << 18
"""Voxels drawn at once, which bounds the memory that writing takes."""


@dataclass(frozen=True, slots=True)
class MappedSamples:
    """Samples of a split in two memory-mapped files.

    ``inputs`` is uint8 [S, C, *sizes], ``labels`` (of voxels) uint8 [S, *sizes], and ``labels_S``
    (of whole samples) int64 [S].
    """

    inputs: MappedArray
    labels: MappedArray
    labels_S: IntArray

    @property
    def sizes_S(self) -> tuple[tuple[int, ...], ...]:
        """Spatial sizes of each sample."""
        return (self.inputs.array.shape[2:],) * len(self.labels_S)

    def read_input(self, index: int, part: VolumePart) -> FloatArray:
        """Returns a part of an input's values, decoded from bytes, float32 [C, *part]."""
        values: FloatArray = self.inputs.array[index][(slice(None), *part)].astype(np.float32)
        values -= np.float32(MIDDLE)
        values *= np.float32(STEP)
        return values

    def read_label(self, index: int, part: VolumePart) -> IntArray:
        """Returns the labels of a part's voxels, int64 [*part]."""
        labels: IntArray = self.labels.array[index][part].astype(np.int64)
        return labels


class GeneratedVolumes:
    """Source: signals, images or volumes of overlapping objects with four textures, and noise.

    A sample depends only on the seed, the sizes, its split and its index. Its label is the texture
    of its largest object, and textures alternate, so that all are equally frequent. The label of a
    voxel is 0 outside all objects, else 1 + the index of the texture in front. Samples are drawn
    once, into the cache: one byte for each channel of a voxel, and one for its label.

    Args:
        root: ignored, because nothing is read.
        labels: what the attribute ``classes`` names: labels of samples or of voxels.
        cache: settings of the cache that keeps the samples.
        sizes: spatial sizes in voxels: one for signals, two for images, three for volumes.
        channels: number of channels; all show the same objects, in different light.
        train_samples: number of training samples.
        test_samples: number of test samples.
        seed: seed of all samples.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None = None,
        *,
        labels: Labels,
        cache: CacheSettings,
        sizes: Sequence[int],
        channels: Count = 1,
        train_samples: Count = 256,
        test_samples: Count = 64,
        seed: Seed = 0,
    ) -> None:
        del root
        if not (1 <= len(sizes) <= 3 and min(sizes) >= 1):
            raise ConfigError(
                f"data.source.sizes={list(sizes)} is not a list of one to three positive sizes",
                remedy="set data.source.sizes to one size for signals, two for images or three for "
                "volumes, each at least 1",
            )
        self.sample_sizes = tuple(sizes)
        self.classes = ("background", *TEXTURES) if labels == "voxel" else TEXTURES
        self._cache, self._channels, self._seed = cache, channels, seed
        self._counts: dict[Split, int] = {"train": train_samples, "test": test_samples}
        self._settings = [VERSION, self.sample_sizes, channels, seed]

    def load(self, split: Split) -> MappedSamples:
        """Returns the samples of a split, after writing them to the cache if necessary."""
        count = self._counts[split]
        digest = digest_values([*self._settings, count])
        folder = self._cache.directory / "volumes" / f"{split}_{digest}"
        inputs, labels = MappedArray(folder / "inputs.npy"), MappedArray(folder / "labels.npy")
        labels_S = np.arange(count, dtype=np.int64) % len(TEXTURES)
        # Of the two files, that of the inputs appears last.
        build = partial(self._write_samples, split, labels_S, inputs.path, labels.path)
        build_once(inputs.path, build, wait_s=self._cache.lock_wait_s)
        return MappedSamples(inputs, labels, labels_S)

    def fingerprint(self) -> str:
        """Returns a hex digest of the settings, which determine the samples."""
        return digest_values([*self._settings, self._counts])

    def _write_samples(self, split: Split, labels_S: IntArray, inputs: Path, labels: Path) -> None:
        sizes, count = self.sample_sizes, len(labels_S)
        step = max(1, _PIECE_VOXELS // math.prod(sizes[1:]))
        pieces = [slice(row, min(row + step, sizes[0])) for row in range(0, sizes[0], step)]
        with (
            new_array(inputs, dtype="uint8", shape=(count, self._channels, *sizes)) as inputs_SC,
            new_array(labels, dtype="uint8", shape=(count, *sizes)) as voxels_S,
            progress(f"drawing {split} samples") as advance,
        ):
            for index, label in enumerate(labels_S):
                seeds = [self._seed, SPLITS.index(split), index]
                objects = draw_objects(int(label), sizes, np.random.default_rng([*seeds, 0]))
                for rows in pieces:
                    voxels_S[index][rows] = draw_labels(objects, sizes, rows)
                for channel in range(self._channels):
                    rng = np.random.default_rng([*seeds, 1 + channel])
                    painted = paint_channel(objects, sizes, rng, pieces)
                    for rows, values in zip(pieces, painted, strict=True):
                        inputs_SC[index][channel][rows] = values
                advance(count)
