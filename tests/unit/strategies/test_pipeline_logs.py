"""Repeated logs give what self.log gives, and cost one call of it."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from sparsepipe.strategies.pipeline.logging import Logged, LogReplay
from tests.support.pipeline_cases import plain_trainer

BATCHES = 5


class Twice(pl.LightningModule):
    """Logs every value itself, and has it repeated under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.metric = MeanMetric()
        self.again = MeanMetric()
        self.calls: list[str] = []
        self.seen: list[dict[str, float]] = []

    def setup(self, stage: str) -> None:
        self.repeater = LogReplay(self)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append(name)
        super().log(name, *args, **kwargs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value, size = batch.mean(), len(batch)
        both = {"on_step": True, "on_epoch": True}
        largest = {"reduce_fx": "max", "on_epoch": True}
        self.metric(value)
        self.again(value)
        self.log("value", value, batch_size=size, **both)
        self.log("last", value, on_epoch=False)
        self.log("largest", value, batch_size=size, **largest)
        self.log("metric", self.metric, **both)
        notes = (
            Logged("value2", value.item(), value.dtype, None, {"batch_size": size, **both}),
            Logged("last2", value.item(), value.dtype, None, {"on_epoch": False}),
            Logged("largest2", value.item(), value.dtype, None, {"batch_size": size, **largest}),
            Logged("metric2", value.item(), value.dtype, "again", both),
        )
        self.repeater.append([notes], hook="training_step")
        self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})
        return (self.weight * value).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_repeated_values_are_those_of_self_log() -> None:
    values = torch.rand(3 * BATCHES - 1, 4, generator=torch.Generator().manual_seed(1)) ** 3
    module = Twice()
    trainer = plain_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(values, batch_size=3))  # the last one is smaller
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["value_epoch"] == pytest.approx(float(values.mean()))
    assert found["largest"] > found["value_epoch"]
    for name in ("value_step", "value_epoch", "last", "largest", "metric_step", "metric_epoch"):
        base, _, kind = name.partition("_")
        other = f"{base}2_{kind}" if kind else f"{base}2"
        assert found[other] == found[name], name
        assert [entry.get(other) for entry in module.seen] == [
            entry.get(name) for entry in module.seen
        ]
    assert module.calls.count("value") == 2 * BATCHES
    assert module.calls.count("value2") <= 2  # once an epoch at most


def test_other_options_for_the_same_name_are_refused_as_by_self_log() -> None:
    class Changing(Twice):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            options = {"on_epoch": batch_idx == 0, "batch_size": 3}
            note = Logged("value", 1.0, torch.float32, None, options)
            self.repeater.append([(note,)], hook="training_step")
            return self.weight.sum()

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="twice"):
        plain_trainer(max_epochs=1).fit(Changing(), DataLoader(torch.rand(6, 4), batch_size=3))
