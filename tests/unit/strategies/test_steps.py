"""On one device a step runs in one piece; what it leaves in a module is on the last stage."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from sparsepipe.strategies.pipeline.steps import run_through
from tests.support.pipeline_cases import (
    QUIET,
    Dense,
    Net,
)
from tests.support.processes import outcomes
from tests.support.synchronous_cases import drop_layers

SAMPLES, BATCH, PARTS = 24, 8, 4
STEPS = SAMPLES // BATCH


class Whitened(Net):
    """Counts its steps and normalises what it gives to the layers; uses that afterwards too."""

    def __init__(self) -> None:
        super().__init__(drop_layers())
        self.before = nn.BatchNorm1d(6, affine=False)
        self.steps = 0
        self.evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        x, y = batch
        white = self.before(x)
        return super().training_step((white, y), batch_idx) + 0 * white.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluations += 1
        super().validation_step((self.before(batch[0]), batch[1]), batch_idx)


def loader() -> DataLoader[Any]:
    return DataLoader(Dense(SAMPLES), batch_size=BATCH)


def fitted(strategy: Any, devices: int = 1) -> Whitened:
    pl.seed_everything(3)
    net = Whitened()
    trainer = pl.Trainer(
        **QUIET, devices=devices, max_epochs=1, num_sanity_val_steps=0, strategy=strategy
    )
    trainer.fit(net, loader(), loader())
    return net


def normalised(parts: int) -> nn.BatchNorm1d:
    """The norm after the same batches by hand, each cut as torch.tensor_split does."""
    norm = nn.BatchNorm1d(6, affine=False)
    for x, _ in loader():
        for part in torch.tensor_split(x, parts):
            norm(part)
    return norm


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_each_microbatch_runs_once(batch_norm: Any) -> None:
    net = fitted(
        SynchronousPipelineStrategy(
            microbatches=PARTS, batch_norm=batch_norm, config="1", cuts=[], timeout_s=60
        )
    )
    assert (net.steps, net.evaluations) == (PARTS * STEPS, STEPS)
    expected = normalised(PARTS if batch_norm == "microbatch" else 1)
    for name, value in expected.named_buffers():
        torch.testing.assert_close(net.before.get_buffer(name), value)


@pytest.mark.parametrize("strategy", [PipelineStrategy, SynchronousPipelineStrategy])
def test_each_minibatch_of_any_pipeline_runs_once(strategy: Any) -> None:
    whole = {} if strategy is PipelineStrategy else {"microbatches": 1}
    net = fitted(strategy(keyed_randomness=True, config="1", cuts=[], **whole))
    assert (net.steps, net.evaluations) == (STEPS, STEPS)
    for name, value in normalised(1).named_buffers():
        torch.testing.assert_close(net.before.get_buffer(name), value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda layers, x: x.sum(), "does not call layers"),
        (lambda layers, x: layers(layers(x)), "calls layers twice"),
        (lambda layers, x: layers(x, x), "with 2 arguments"),
        (lambda layers, x: layers(x.requires_grad_()), "needs a gradient"),
    ],
)
def test_whole_steps_are_checked_like_steps_in_two_halves(step: Any, message: str) -> None:
    layers = nn.Sequential(nn.Tanh())
    with pytest.raises(ConfigError, match=message):
        run_through(layers, lambda: step(layers, torch.ones(2, 3)), run=lambda value: value)
    assert "forward" not in vars(layers)


def in_stages(rank: int) -> None:
    strategy = SynchronousPipelineStrategy(
        microbatches=PARTS, batch_norm="deferred", config="1-1", cuts=[4], timeout_s=60
    )
    fitted(strategy, devices=2)


@pytest.mark.full
def test_norms_before_the_layers_of_several_stages_are_refused_where_they_would_move_once() -> None:
    first, last = outcomes(in_stages, 2, limit_s=60)
    assert isinstance(first.error, ConfigError)
    assert "before (BatchNorm1d) runs before the layers" in first.error.message
    assert "first entry of the Sequential" in first.error.remedy
    assert last.error is not None
