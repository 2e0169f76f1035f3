"""What ranks that do not read take part in, and how many batches an evaluation has in flight."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    dealt,
    dense_layers,
    make_loader,
    pipeline_trainer,
    plain_trainer,
)
from tests.support.processes import outcomes, run


class Measured(Net):
    """With metrics of every kind, in a collection with groups, and steps of its own."""

    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.many = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES),
                "f1": MulticlassF1Score(CLASSES),
                "auroc": MulticlassAUROC(CLASSES),
            }
        )
        self.mean = MeanMetric()
        self.late: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.layers(x)
        self.many.update(logits, y)
        self.mean.update(logits.mean())
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("batches", 1.0, reduce_fx="sum", batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.many.compute())
        self.log("mean", self.mean.compute())
        self.many.reset()
        self.mean.reset()


def measured(rank: int, config: str | None) -> Any:
    torch.manual_seed(2)
    net = Measured()
    trainer = plain_trainer() if config is None else pipeline_trainer(config, [3])
    readers = 1 if config is None else int(config[0])
    loader = dealt(5, readers=readers, reader=rank if rank < readers else 0)
    first = trainer.validate(net, loader, verbose=False)
    return first, trainer.validate(net, loader, verbose=False)


@pytest.mark.parametrize(
    "config",
    [
        "1-1",
        pytest.param("1-2", marks=pytest.mark.full),
        pytest.param("2-1", marks=pytest.mark.full),
        "2-2",
    ],
)
def test_metrics_are_those_of_one_process(config: str) -> None:
    """Five batches: with two readers the last round is partial."""
    ((plain, again),) = run(measured, 1, None)
    assert plain == again
    for first, second in run(measured, sum(map(int, config.split("-"))), config):
        assert first == second
        assert first[0].keys() == plain[0].keys()
        assert first[0] == pytest.approx(plain[0], rel=1e-6)
        if config == "1-1":
            assert first == plain


class Fails(Net):
    """Raises at some place, when it comes there for the given time."""

    def __init__(self, place: str, time: int) -> None:
        super().__init__(dense_layers())
        self.place, self.left = place, time

    def here(self, place: str) -> None:
        self.left -= place == self.place
        if not self.left:
            raise ValueError("a bug of somebody's")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.here("step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.here("validation")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.here("update")


def failing(rank: int, config: str, place: str, time: int) -> None:
    trainer = pipeline_trainer(config, [3], max_epochs=2, num_sanity_val_steps=0)
    net = Fails(place if rank == trainer.world_size - 1 else "", time)
    trainer.fit(net, make_loader("dense", batches=4), make_loader("dense", batches=3))


@pytest.mark.parametrize(
    ("config", "place", "time", "says"),
    [
        ("1-1", "step", 4, "forward of minibatch 3"),
        ("1-1", "step", 6, "forward of minibatch 5"),  # the second one after a drain
        ("1-1", "update", 6, "update of minibatch 5"),
        ("1-2", "update", 4, "update of the round that begins with minibatch 6"),
        ("1-1", "validation", 5, "forward of batch 1 of the evaluation"),
    ],
)
def test_an_error_names_its_place_and_ends_the_other_ranks(
    config: str, place: str, time: int, says: str
) -> None:
    ranks = sum(map(int, config.split("-")))
    *others, last = outcomes(failing, ranks, config, place, time, limit_s=60)
    assert isinstance(last.error, ValueError)
    assert f"rank {ranks - 1}, stage 1: {says}\n" in last.trace
    assert all(other.error is not None for other in others)
    if says == "forward of minibatch 5":  # messages go by the same numbers
        numbers = re.findall(r"minibatch (\d+)", str(others[0].error))
        assert numbers
        assert min(map(int, numbers)) >= 4
    assert max(last.ended_s, *(other.ended_s for other in others)) < 40


BATCHES = 40


HELD_S = 1.0


class Timed(nn.Module):
    """Notes when it has run in evaluation.

    Args:
        held_s: what its first run takes.
    """

    def __init__(self, held_s: float = 0.0) -> None:
        super().__init__()
        self._held_s = held_s
        self.times: list[float] = []

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.0 if self.times else self._held_s)
            self.times.append(time.monotonic())
        return value


def ends(rank: int, schedule: str | None) -> list[float]:
    """When this rank's stage had run each batch of a validation."""
    torch.manual_seed(0)
    timed = Timed(), Timed(HELD_S)
    net = Net(nn.Sequential(nn.Linear(6, 8), timed[0], nn.Linear(8, CLASSES), timed[1]))
    options: dict[str, Any] = {"config": "1-1", "cuts": [2], "timeout_s": 60}
    strategy: Any
    if schedule is None:
        strategy = PipelineStrategy(**options)
    else:
        strategy = SynchronousPipelineStrategy(schedule=schedule, microbatches=32, **options)
    trainer = pl.Trainer(
        **QUIET, max_epochs=1, devices=2, strategy=strategy, num_sanity_val_steps=0
    )
    trainer.fit(
        net,
        DataLoader(Dense(32), batch_size=32),
        DataLoader(Dense(BATCHES * 4), batch_size=4),
    )
    return timed[rank].times


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", None])
def test_the_first_stage_is_held_back(schedule: str | None) -> None:
    """By a last stage that stays with its first batch.

    Two batches lie in the sender's queue, one waits for room there, one is under way, one lies
    ready, and one is computed.
    """
    first, last = run(ends, 2, schedule)
    assert len(first) == len(last) == BATCHES
    assert sum(end < last[0] for end in first) <= 6
