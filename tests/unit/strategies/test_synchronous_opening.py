"""When the first stage runs what a step does before its layers, for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.drop_nets import drop_layers
from tests.support.pipeline_cases import QUIET, Dense, Net, dense_layers, weights
from tests.support.processes import outcomes, run

CUTS = {"1": [], "1-1": [3], "2-1": [3], "1-1-1": [2, 4]}


class Noting(Net):
    """Notes microbatches as its step begins, and as the gradient comes to its first parameter."""

    def __init__(self, *, failing: int | None = None) -> None:
        super().__init__(dense_layers())
        self.notes: list[str] = []
        self.failing = failing
        next(self.layers.parameters()).register_hook(lambda _: self.notes.append("back"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opened = self.notes.count("open")
        self.notes.append("open")
        if opened == self.failing:
            raise ArithmeticError("before the layers")
        return super().training_step(batch, batch_idx)


def readers_and_ranks(config: str) -> tuple[int, int]:
    replicas = [int(part) for part in config.split("-")]
    return replicas[0], sum(replicas)


def train(net: Net, config: str, schedule: str, microbatches: int, **options: Any) -> None:
    """One minibatch of 16 samples for each reader."""
    readers, devices = readers_and_ranks(config)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule,
        microbatches=microbatches,
        config=config,
        cuts=CUTS[config],
        timeout_s=60,
        **options,
    )
    trainer = pl.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=strategy)
    trainer.fit(net, DataLoader(Dense(16 * readers), batch_size=16))


def noted(rank: int, config: str, schedule: str, microbatches: int) -> str:
    net = Noting()
    train(net, config, schedule, microbatches)
    return " ".join(net.notes)


@pytest.mark.parametrize(
    ("config", "schedule", "microbatches", "expected"),
    [
        ("1-1", "1f1b", 4, "open open open back open back back back"),
        ("1-1", "eager_1f1b", 5, "open open open open back open back back back back"),
        ("1-1", "gpipe", 4, "open open open open back back back back"),
        ("1-1-1", "1f1b", 6, "open open open open back open back open back back back back"),
        ("2-1", "1f1b", 8, "open open open back open back back back"),
        ("1", "1f1b", 3, "open back open back open back"),
    ],
)
def test_the_next_microbatch_opens_before_the_wait_for_a_gradient(
    config: str, schedule: str, microbatches: int, expected: str
) -> None:
    """No more than one is ahead; on one device there is no wait, hence none."""
    readers, ranks = readers_and_ranks(config)
    found = run(noted, ranks, config, schedule, microbatches)
    assert found[:readers] == [expected] * readers


def failing(rank: int) -> None:
    train(Noting(failing=2), "1-1", "1f1b", 4)


def test_what_fails_there_is_the_forward_of_that_microbatch() -> None:
    first, _ = outcomes(failing, 2, limit_s=60)
    assert isinstance(first.error, ArithmeticError)
    assert first.error.__notes__ == ["rank 0, stage 0: forward of microbatch 2 of minibatch 0"]


class Drawing(Net):
    """Draws before the layers, as its dropout does within them, from the same generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x + torch.rand(len(x), 1)), y)


def drawn(rank: int, recompute: str) -> Any:
    torch.manual_seed(3)
    net = Drawing(drop_layers())
    train(net, "1-1", "1f1b", 4, recompute=recompute)
    return weights(net)


def test_a_second_run_of_layers_draws_nothing_of_the_microbatch_that_is_ahead() -> None:
    """It comes after that microbatch's own draws, which go on where they were."""
    kept, again = run(drawn, 2, "none")[0], run(drawn, 2, "all")[0]
    assert all(torch.equal(value, kept[name]) for name, value in again.items())
