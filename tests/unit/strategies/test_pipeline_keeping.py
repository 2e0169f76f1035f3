"""Outputs that steps collect by hand are warned of; what is logged or measured is everywhere."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from tests.support.pipeline_cases import (
    Net,
    dense_layers,
    make_loader,
    pipeline_trainer,
    plain_trainer,
)
from tests.support.processes import run


class Collects(Net):
    """Collects losses in a list, as Lightning's own documents show, and in a metric."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(dense_layers())
        self.outputs: list[Tensor] = []
        self.mean = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.outputs.append(loss)
        self.mean.update(loss)
        self.log("loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()


def collected(rank: int, config: str | None) -> Any:
    net = Collects()
    trainer = plain_trainer() if config is None else pipeline_trainer(config, [3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (metrics,) = trainer.validate(net, make_loader("dense", batches=3), verbose=False)
    said = [str(w.message) for w in caught if "validation_step" in str(w.message)]
    return metrics, len(net.outputs), said


def test_lists_are_on_the_last_stage_and_metrics_everywhere() -> None:
    ((plain, outputs, _),) = run(collected, 1, None)
    assert outputs == 3
    assert abs(plain["mean"] - plain["loss"]) < 1e-6
    first, second = run(collected, 2, "1-1")
    assert first[0] == second[0] == plain
    assert (first[1], second[1]) == (0, 3)
    assert not first[2]
    (warned,) = second[2]
    assert "adds to self.outputs" in warned
    assert "self.log or a torchmetric" in warned
