"""Data loaders: samplers, batches of samples and worker processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from sparsepipe.data.points import IntArray
from sparsepipe.errors import ConfigError
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import exit_with_parent, keep_freed_memory

Access = tuple[int, int]
"""(epoch, index) of an access to a sample; the index is a position in the data set."""


class TrainSampler(DistributedSampler[Any]):
    """Sampler that shuffles the samples in each epoch and gives every rank the same number of them.

    If the ranks cannot share an epoch's samples equally, they draw at most ``num_replicas - 1``
    further ones, so that none is left out.

    Args:
        dataset: as for ``DistributedSampler``, like ``num_replicas``, ``rank`` and ``seed``.
        samples: number of samples that all ranks together draw in an epoch; if the data set has
            fewer, they are repeated in new orders. None: as many as it has.
        stream: number that gives data sets with the same seed different orders.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        samples: int | None = None,
        stream: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)  # type: ignore[arg-type]
        self._size = len(dataset)
        self._samples = self._size if samples is None else samples
        self._stream = stream

    def __len__(self) -> int:
        return math.ceil(self._samples / self.num_replicas)

    def __iter__(self) -> Iterator[Access]:
        wanted = len(self) * self.num_replicas
        passes = 1 if self._samples == self._size else math.ceil(wanted / self._size)
        accesses = list[Access]()
        for number in range(passes):
            own = (self._stream, number) if self._stream or number else ()
            order_N = np.random.default_rng([self.seed, self.epoch, *own]).permutation(self._size)
            # Each pass is an epoch of its own, so that augmentation differs as well.
            epoch = self.epoch * passes + number
            accesses += [(epoch, int(index)) for index in order_N]
        padded = accesses * math.ceil(wanted / max(len(accesses), 1))
        return iter(padded[self.rank : wanted : self.num_replicas])


class EvalSampler(DistributedSampler[Any]):
    """Sampler that deals the samples to the ranks in turn; some ranks may get one more than others.

    The epoch is always 0, so that every evaluation draws the same points. Arguments are as for
    ``DistributedSampler``.
    """

    def __init__(self, dataset: Sized, *, num_replicas: int = 1, rank: int = 0) -> None:
        if 0 < len(dataset) < num_replicas:
            raise ConfigError(
                f"validation or test needs a sample for each rank, but has {len(dataset)} for "
                f"{num_replicas} ranks",
                remedy=f"set parallel.devices to at most {len(dataset)}, or provide more samples "
                "(for validation, raise data.val_share)",
            )
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        self._own = range(rank, len(dataset), num_replicas)

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Access]:
        return iter([(0, index) for index in self._own])


def split_validation(labels_S: IntArray, *, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Returns the sorted indices of training and of validation samples.

    Validation gets a random ``share`` of every class (label -1 counts as one). Unless ``share`` is
    0, both get at least one sample of each class that has two or more.
    """
    rng = np.random.default_rng([seed, 0x5711])
    held = [np.empty(0, np.int64)]  # there may be no samples at all
    for label in np.unique(labels_S):
        members_N = rng.permutation(np.flatnonzero(labels_S == label))
        count = round(share * len(members_N))
        if share > 0 and len(members_N) > 1:
            count = min(max(count, 1), len(members_N) - 1)
        held.append(members_N[:count])
    validation_N = np.sort(np.concatenate(held))
    training_N = np.setdiff1d(np.arange(len(labels_S)), validation_N)
    return training_N, validation_N


_CORES_PER_WORKER = 4
_MAX_WORKERS = 8
_PRELOADED = (
    "torch",
    "pytorch_lightning",
    "torchmetrics.classification",
    "hydra",
    "trimesh",
    __name__,
)
"""Modules of the main module or data set that each worker would otherwise import itself."""


def default_workers(ranks: int | None = None) -> int:
    """Returns the default number of loader workers of a rank: a quarter of its cores, at most 8.

    ``ranks``: number of ranks that share this machine's cores; None: ``LOCAL_WORLD_SIZE`` of the
    environment, or else 1. With 0 workers, the training process reads the samples: on few cores,
    workers only slow down training, since reading a shape takes much less time than training on it.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    return min(_MAX_WORKERS, usable_cores() // max(1, local_ranks) // _CORES_PER_WORKER)


def stacked(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collates samples into a batch: for each key, a tensor [B, ...] of the B samples' values.

    If there is only one sample, its arrays are not copied.
    """
    batch = {}
    for name in samples[0]:
        values = [np.asarray(sample[name]) for sample in samples]
        batch[name] = torch.from_numpy(values[0][None] if len(values) == 1 else np.stack(values))
    return batch


def make_loader(
    dataset: Dataset[dict[str, Any]],
    *,
    sampler: Sampler[Access],
    batch_size: int,
    num_workers: int,
    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
    keeps_memory: bool = False,
) -> DataLoader[dict[str, Any]]:
    """Returns a loader of collated batches.

    Workers start with ``forkserver``, or ``spawn`` where that is not available, because forking the
    training process is unsafe once autograd, OpenMP or gloo have started threads. Arguments are as
    for ``DataLoader``; ``collate``, its ``collate_fn``, is pickled for workers. With
    ``keeps_memory`` workers keep the memory of earlier batches: each batch would wait for fresh
    pages, but large ones would stay at their peak.
    """
    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=method if num_workers else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=partial(_start_worker, keeps_memory=keeps_memory),
    )


def import_once_for_workers() -> None:
    """Sets the modules that the fork server imports, so that loader workers need not import them.

    Must be called before the first workers start; replaces the list of modules set before.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        loaded = [name for name in _PRELOADED if name in sys.modules]
        multiprocessing.set_forkserver_preload(["__main__", *loaded])


def _start_worker(worker: int, *, keeps_memory: bool) -> None:
    """Limits torch to one thread in a loader worker, which ends when its parent process ends."""
    del worker  # nothing random depends on which worker reads a sample
    torch.set_num_threads(1)
    if keeps_memory:
        keep_freed_memory()
    # Torch checks for the parent only every few seconds, and never while a worker reads.
    exit_with_parent()
