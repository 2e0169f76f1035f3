"""What a data set of signals, images or volumes reads from: samples of which any part can be read.

Shapes: S samples of a split, C channels of an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from sparsepipe.data.points import FloatArray, IntArray, Split
from sparsepipe.errors import ConfigError

Labels = Literal["sample", "voxel"]
"""What has a label: each sample or each of its voxels."""
Part: TypeAlias = tuple[slice, ...]
"""A slice with start and stop for each spatial dimension."""


class Samples(Protocol):
    """The samples of one split."""

    @property
    def labels_S(self) -> IntArray:
        """The class of each sample; 0 where only voxels have labels."""
        ...

    def read_input(self, index: int, part: Part) -> FloatArray:
        """A part of an input, float32 [C, *part]; no more than it is held in memory.

        Raises:
            DataError: a file is missing or broken.
        """
        ...

    def read_label(self, index: int, part: Part) -> IntArray:
        """The labels of the same part, int64 [*part], where voxels have labels.

        Raises:
            DataError: a file is missing or broken, or has other labels than the classes.
        """
        ...


class VolumeSource(Protocol):
    """A source of signals, images or volumes, for both splits.

    It is called as ``source(root, labels=..., cache=...)`` with ``data.root``, ``data.labels`` and
    the ``CacheSettings``.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of samples, or of voxels."""
        ...

    @property
    def sample_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of every sample."""
        ...

    def load(self, split: Split) -> Samples:
        """The samples of a split, written to the cache first if necessary.

        Raises:
            DataError: files are missing, broken or do not fit each other.
        """
        ...

    def fingerprint(self) -> str:
        """Hex digest of the samples, independent of their location on the disk."""
        ...


def whole_part(sizes: Sequence[int]) -> Part:
    """All of a sample."""
    return tuple(slice(0, size) for size in sizes)


def checked_part(slices: Sequence[slice], sizes: Sequence[int]) -> Part:
    """Slices of a sample with their starts and ends.

    Raises:
        ConfigError: they are not one for each dimension, reach beyond the sample, or have steps.
    """
    pairs = list(zip(slices, sizes, strict=False))
    part = tuple(
        slice(0 if each.start is None else each.start, size if each.stop is None else each.stop)
        for each, size in pairs
    )
    fits = all(
        0 <= own.start <= own.stop <= size and each.step in (None, 1)
        for own, (each, size) in zip(part, pairs, strict=True)
    )
    if len(slices) != len(sizes) or not fits:
        raise ConfigError(
            f"{list(slices)} is no part of a sample of {' x '.join(map(str, sizes))}",
            remedy="give read_part one slice(start, stop) for each spatial dimension, within the "
            "sample and without a step",
        )
    return part
