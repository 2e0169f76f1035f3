"""Data loaders: samplers, worker processes, and error messages when workers fail."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from sparsepipe.data.points import IntArray
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.host import usable_cores

Access = tuple[int, int]
"""(epoch, index) of one read of one shape."""


class TrainSampler(DistributedSampler[Any]):
    """Each epoch's shuffled shapes, the same number for every rank.

    Where the shapes do not divide evenly, the shuffled order is continued from its start,
    so that at most ``num_replicas - 1`` shapes are seen twice in an epoch and none is left
    out.

    Args:
        dataset: what is sampled; only its length matters.
        num_replicas: ranks that share an epoch.
        rank: this one.
        seed: with the epoch, determines the order.
    """

    def __init__(
        self, dataset: Sized, *, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)  # type: ignore[arg-type]
        self._size = len(dataset)

    def __len__(self) -> int:
        return math.ceil(self._size / self.num_replicas)

    def __iter__(self) -> Iterator[Access]:
        order_N = np.random.default_rng([self.seed, self.epoch]).permutation(self._size)
        padded_N = np.resize(order_N, len(self) * self.num_replicas)
        return _accesses(self.epoch, padded_N[self.rank :: self.num_replicas])


class EvalSampler(DistributedSampler[Any]):
    """All shapes in order, each for exactly one rank; ranks may have unequal counts.

    The epoch is always 0: a network is tested on the same points each time.

    Args:
        dataset: what is sampled; only its length matters.
        num_replicas: ranks that share the shapes.
        rank: this one.

    Raises:
        ConfigError: there are shapes, but not one for each rank.
    """

    def __init__(self, dataset: Sized, *, num_replicas: int = 1, rank: int = 0) -> None:
        if 0 < len(dataset) < num_replicas:
            raise ConfigError(
                f"{len(dataset)} shapes to validate or test cannot be shared by "
                f"{num_replicas} ranks",
                remedy=f"set parallel.devices to at most {len(dataset)}, or give more shapes "
                "(data.val_share for validation)",
            )
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        self._size = len(dataset)

    def __len__(self) -> int:
        return len(range(self.rank, self._size, self.num_replicas))

    def __iter__(self) -> Iterator[Access]:
        return _accesses(0, np.arange(self.rank, self._size, self.num_replicas))


def _accesses(epoch: int, order_N: IntArray) -> Iterator[Access]:
    return ((epoch, int(index)) for index in order_N)


def split_validation(labels_S: IntArray, *, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Indices for training and for validation, with ``share`` of every class in the latter.

    A class with at least two shapes gives at least one to each side (unless ``share`` is 0).
    """
    rng = np.random.default_rng([seed, 0x5711])
    held: list[IntArray] = []
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


_SLOW = ("torch", "pytorch_lightning", "torchmetrics.classification", "hydra", "trimesh", __name__)
"""What workers would import one by one: data and a main module that they unpickle want it."""


_DEATHS = ("exited unexpectedly", "is killed by signal", "bus error")
"""What torch says when a worker is gone."""


def default_workers() -> int:
    """Loader workers for this process: one for every four of its cores, at most eight.

    Reading a shape is cheap beside training on it (``benchmarks/data.py`` measures both), so
    on few cores a worker would only take time from training; 0 reads in the training process.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(_MAX_WORKERS, usable_cores() // max(1, local_ranks) // _CORES_PER_WORKER)


class ShapeLoader(DataLoader[dict[str, Any]]):
    """A DataLoader over ``ShapeDataset``, or images, that explains why its workers failed.

    It has the arguments of ``DataLoader``, since Lightning builds it anew for prediction.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not any(sign in str(error) for sign in _DEATHS):
                    raise  # an error in a worker, told with its traceback
                raise _death(error) from error
            yield batch


def make_loader(
    dataset: Dataset[dict[str, Any]],
    *,
    sampler: Sampler[Access],
    batch_size: int,
    num_workers: int,
    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
) -> ShapeLoader:
    """A loader of collated batches.

    Workers start by ``forkserver`` (``spawn`` where there is none): forking the training
    process itself is unsafe once it runs threads, as autograd, OpenMP and gloo do.

    Args:
        dataset: the shapes, or images.
        sampler: yields (epoch, index).
        batch_size: shapes in a batch.
        num_workers: processes that read; 0 reads in this one.
        collate: puts samples together; workers get a copy of it.
    """
    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    return ShapeLoader(
        dataset,
        sampler=sampler,
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=method if num_workers else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=_start_worker,
    )


def import_once_for_workers() -> None:
    """Lets the server that forks loader workers import what each of them wants.

    For the process of a run, before its first loader: there is one server for all of a process,
    and it has one list of modules, which this replaces.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        slow = [name for name in _SLOW if name in sys.modules]
        multiprocessing.set_forkserver_preload(["__main__", *slow])


def _start_worker(worker: int) -> None:
    """One thread for each worker: the cores belong to training, with which it ends."""
    del worker  # nothing random depends on which worker reads a shape
    torch.set_num_threads(1)
    training = multiprocessing.parent_process()
    if training is not None:
        threading.Thread(target=_end_with, args=(training,), daemon=True).start()


def _end_with(training: BaseProcess) -> None:
    """Ends this process with that one, however that ends.

    Torch looks every few seconds, and not while a worker reads.
    """
    training.join()
    os._exit(1)  # nothing to tell and nobody to tell it to


def _death(error: RuntimeError) -> DataError:
    return DataError(
        f"a loader worker was ended: {str(error).splitlines()[0]}",
        remedy="usually memory or shared memory (/dev/shm) ran out: lower data.batch_size or "
        "data.num_workers; data.num_workers=0 reads in the training process and shows the "
        "cause",
    )
