"""How many batches of an evaluation are on their way at most."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import CLASSES, QUIET, Dense, Net
from tests.support.processes import run

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
