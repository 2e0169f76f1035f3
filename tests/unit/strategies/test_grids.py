"""Code of the user meets the same samples and gradients on grids of ranks as in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

from sparsepipe.strategies import SpatialStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared

SAMPLES = 8


class Drawn(Sampler[int]):
    """A sampler of the user's own, which draws a new order in each epoch."""

    def __init__(self, shuffle: Callable[[list[int]], Any]) -> None:
        self._shuffle = shuffle

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self._shuffle(order)
        return iter(order)


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 4, 4), float(index)), torch.tensor(index)


class Noting(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU())
        self.read: list[tuple[str, list[int]]] = []

    def _step(self, batch: Any, *_: int) -> Tensor:
        self.read.append((str(self.trainer.state.stage), batch[1].tolist()))
        loss: Tensor = self.layers(batch[0]).mean()
        return loss

    training_step = validation_step = predict_step = _step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 2},
    "shuffled": lambda: {"batch_size": 2, "shuffle": True},
    "own generator": lambda: {"batch_size": 2, "shuffle": True, "generator": torch.Generator()},
    "drawn by numpy": lambda: {"batch_size": 2, "sampler": Drawn(np.random.shuffle)},
    "drawn by Python": lambda: {"batch_sampler": BatchSampler(Drawn(random.shuffle), 2, False)},
    "drawn with weights": lambda: {"batch_size": 2, "sampler": WeightedRandomSampler([1, 3], 8)},
    "batches of its own": lambda: {"batch_sampler": [[0, 7], [6, 1], [5, 2], [3, 4]]},
}


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one process": lambda: "auto",
    "grid": lambda: SpatialStrategy(grid=(1, 2), timeout_s=60.0),
    "pipeline": lambda: SynchronousPipelineStrategy(
        config="1-1", cuts=[1], grids=[(1, 2), None], microbatches=1, timeout_s=60.0
    ),
}


def read(rank: int, name: str, strategy: str, ranks: int) -> Any:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7 + rank)  # as if the script had not seeded them
    module, loader = Noting(), DataLoader(Numbered(), **LOADERS[name]())
    trainer = pl.Trainer(
        **{**QUIET, "devices": ranks, "max_epochs": 2, "strategy": STRATEGIES[strategy]()}
    )
    trainer.fit(module, loader, loader)
    return module.read


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_is_read_in_its_own_order(name: str) -> None:
    (alone,) = run_shared(read, 1, name, "one process", 1)
    assert run_shared(read, 2, name, "grid", 2) == [alone, alone]
    if name == "shuffled":  # a stage's ranks read through the first one
        assert run_shared(read, 3, name, "pipeline", 3)[-1] == alone
