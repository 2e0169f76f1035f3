"""When the first stage runs what a step does before its layers, for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
from pipeline_cases import QUIET, Dense, Net, dense_layers
from processes import outcomes, run
from torch import Tensor
from torch.utils.data import DataLoader

from sparsepipe.strategies import SynchronousPipelineStrategy

MICROBATCHES = 4


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


def fit(rank: int, schedule: str, failing: int | None = None) -> list[str]:
    """One minibatch through two stages; what this rank noted."""
    net = Noting(failing=failing)
    strategy = SynchronousPipelineStrategy(
        schedule=schedule, microbatches=MICROBATCHES, config="1-1", cuts=[3], timeout_s=60
    )
    trainer = pl.Trainer(**QUIET, devices=2, max_epochs=1, strategy=strategy)
    trainer.fit(net, DataLoader(Dense(16), batch_size=16))
    return net.notes


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", "open open open back open back back back"),
        ("gpipe", "open open open open back back back back"),
    ],
)
def test_the_next_microbatch_opens_before_the_wait_for_a_gradient(
    schedule: str, expected: str
) -> None:
    """Whose microbatch is one of those in flight; no more than one is ahead."""
    assert run(fit, 2, schedule)[0] == expected.split()


def test_what_fails_there_is_the_forward_of_that_microbatch() -> None:
    first, _ = outcomes(fit, 2, "1f1b", 2, limit_s=60)
    assert isinstance(first.error, ArithmeticError)
    assert first.error.__notes__ == ["rank 0, stage 0: forward of microbatch 2 of minibatch 0"]
