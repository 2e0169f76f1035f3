"""Samplers that say which epoch a shape is read for, and how ranks share the shapes.

They yield (epoch, index), so that a shape's points and augmentation follow from
(seed, epoch, index) alone, whatever the number of workers or ranks. Deriving from
torch's ``DistributedSampler`` keeps Lightning from putting its own in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from sparsepipe.data.points import IntArray
from sparsepipe.errors import ConfigError

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
