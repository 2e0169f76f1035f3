"""Data loaders of equal length for every rank.

Only stage 0 reads batches. Every rank goes through the same number of steps, with a stand-in
for the batch on ranks that do not read, or have read all their batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.collectives import process_group

_STATE = ("state_dict", "load_state_dict")
_PASSED_ON = ("sampler", "batch_sampler", "dataset", "generator", *_STATE)
_LENGTHS = "lengths_of_readers"


@dataclass(slots=True, eq=False)  # Lightning refuses frozen data classes
class RemoteBatch:
    """Stands in for the batch of a step, in hooks, on a rank that reads none in that step."""

    size: Tensor = field(default_factory=lambda: torch.tensor(1))
    """A scalar, which Lightning counts as one sample when hooks log values of this batch."""

    def to(self, *args: Any, **kwargs: Any) -> RemoteBatch:
        return self


REMOTE_BATCH = RemoteBatch()


class Padded:
    """Pads a loader to ``length`` batches with stand-ins; all are stand-ins without ``reads``."""

    def __init__(self, loader: Iterable[Any], length: int, *, reads: bool = True) -> None:
        self.loader, self.reads = loader, reads
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches = self.loader if self.reads else ()
        padded = itertools.chain(batches, itertools.repeat(REMOTE_BATCH))
        return itertools.islice(padded, self._length)

    def __getattr__(self, name: str) -> Any:
        # Lightning sets the epoch of samplers and restores states; others read the data set.
        if name in _STATE and not self.reads:
            return lambda *state: {}
        if name in _PASSED_ON:
            return getattr(self.loader, name)
        raise AttributeError(name)


def adapt_loader(loader: Any, *, reader: int | None) -> Any:
    """Returns the loader, padded with stand-ins to the largest number of batches on any rank.

    Every rank must call this, for its loaders in the same order. ``reader`` is this rank's index
    among the replicas of stage 0; None if it does not read.
    """
    length = sized_len(loader)
    reported = process_group.gather_objects((reader, -1 if length is None else length))
    lengths = [n for r, n in sorted((r, n) for r, n in reported if r is not None)]
    if min(lengths) < 0:
        raise ConfigError(
            f"{type(loader).__name__} has no length, but a pipeline must know when its batches end",
            remedy="use a data set with a length (no IterableDataset), or give the loader one",
        )
    longest = lengths[0]
    if lengths != sorted(lengths, reverse=True) or longest - lengths[-1] > 1:
        raise ConfigError(
            f"the loaders of stage 0's replicas have {', '.join(map(str, lengths))} batches, but "
            "this number must not rise from the first replica to the last, nor fall by more than 1",
            remedy="use a sampler that deals batches out in turn, as DistributedSampler does",
        )
    exact = isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
    adapted = loader
    if reader is None or lengths[reader] < longest or not exact:
        adapted = Padded(loader, longest, reads=reader is not None)
    setattr(adapted, _LENGTHS, lengths)
    return adapted


def count_minibatches(
    loaders: Sequence[Any], batch_idx: int, batch: Any, *, reader: int | None
) -> int:
    """Returns how many ranks read a batch in step ``batch_idx`` of :func:`adapt_loader`'s loaders.
    ``batch`` and ``reader`` are this rank's, to check that its loader ends when its length says.
    """
    known: list[list[int]] = [getattr(loader, _LENGTHS) for loader in loaders]
    if len(known) > 1 and any(lengths[0] != lengths[-1] for lengths in known):
        raise ConfigError(
            "several loaders are read side by side, but ranks have different numbers of batches",
            remedy="use samplers that give each rank equally many batches, or a single loader",
        )
    count = len(known[0])
    if len(known) == 1:
        count = sum(length > batch_idx for length in known[0])
    if reader is not None and reader < count and is_remote(batch):
        raise ConfigError(
            f"the loader ended before batch {batch_idx + 1}, although its length includes it",
            remedy="correct the length of the data set or of its sampler",
        )
    return count


def has_state(loader: Any) -> bool:
    """Returns whether a loader can save and restore its position."""
    return all(callable(getattr(loader, name, None)) for name in _STATE)


def is_remote(batch: Any) -> bool:
    """Returns whether a batch is, or contains, a :class:`RemoteBatch`."""
    return any(isinstance(leaf, RemoteBatch) for leaf in pytree.tree_leaves(batch))
