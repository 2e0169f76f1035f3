"""Measuring the layers changes nothing of a run, and fails on all ranks or on none."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pipeline_cases import BATCH, QUIET, Dense, Net, dense_layers
from processes import outcomes, run
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import PipelineStrategy


class Noisy(Dense):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(6 * BATCH)
        self.draw = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.rand(6, generator=self.draw), y


class Transferred(Net):
    """Its steps want what the hooks for batches make."""

    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.seen: list[Tensor] = []
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": x, "y": y}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch["x"].device == self.device
        return batch["x"], batch["y"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, tuple):
            self.seen.append(batch[0])


def trainer(devices: int) -> pl.Trainer:
    strategy = PipelineStrategy(timeout_s=20) if devices > 1 else "auto"
    return pl.Trainer(**QUIET, devices=devices, max_epochs=2, strategy=strategy)


def drawing(rank: int, devices: int) -> Any:
    torch.manual_seed(5)
    seen = []
    for kind in ("loader", "sampler"):
        draw = torch.Generator().manual_seed(9)
        data = Noisy()
        loader: DataLoader[Any] = (
            DataLoader(data, batch_size=BATCH, shuffle=True, generator=draw)
            if kind == "loader"
            else DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, generator=draw))
        )
        net = Transferred()
        fitting = trainer(devices)
        fitting.fit(net, loader)
        assert net.steps == 12
        seen.append(net.seen)
        if devices > 1:
            assert fitting.strategy.plan.cuts == (3,)  # type: ignore[attr-defined]
    return seen


def test_batches_are_those_of_one_device() -> None:
    (plain,) = run(drawing, 1, 1)
    first, second = run(drawing, 2, 2)
    assert second == [[], []]
    for found, expected in zip(first, plain, strict=True):
        assert len(found) == len(expected) == 12
        assert all(map(torch.equal, found, expected))


class Stumbles(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("a bug before the layers")


def stumbling(rank: int) -> None:
    trainer(2).fit(Stumbles(dense_layers()), DataLoader(Noisy(), batch_size=BATCH))


def test_a_failure_is_that_of_all_ranks() -> None:
    first, second = outcomes(stumbling, 2, limit_s=60)
    assert isinstance(first.error, KeyError)
    assert "while rank 0 measured the layers" in first.trace
    assert isinstance(second.error, ConfigError), second
    assert "rank 0 could not measure the layers: KeyError: 'a bug" in second.error.message
