"""What a training that takes long says of itself where there is no terminal."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.callbacks import EpochLines, Forecast
from sparsepipe.utils.progress import Silence
from tests.support.replay_cases import plain_trainer


class Slow(pl.LightningModule):
    """A network whose batches take 50 ms."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(1, 1), fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.05)
        if self.fails and batch_idx == 3:
            raise ArithmeticError
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0.05)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


LOADER = DataLoader(torch.ones(6, 1))


def test_batches_of_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparsepipe")
    trainer = plain_trainer(tmp_path, EpochLines(silence=Silence(longest_s=0.07)), max_epochs=2)
    trainer.fit(Slow(), LOADER, LOADER)
    for phase in ("epoch 1/2", "epoch 2/2"):
        assert any(f"{phase}, batches: " in line for line in caplog.messages), phase
    counted = [line for line in caplog.messages if "batches" in line]
    assert any(" 2 of 6 " in line and "left" in line for line in counted)
    assert "progress" not in threads()


def test_a_training_that_fails_is_silent_afterwards(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, EpochLines(silence=Silence(longest_s=0.07)), max_epochs=1)
    with pytest.raises(ArithmeticError):
        trainer.fit(Slow(fails=True), LOADER)
    assert "progress" not in threads()


@pytest.mark.parametrize(
    ("batch_s", "limits", "expected"),
    [
        (100.0, {"max_epochs": 2}, "about 17 min of training are left, at 100 s a batch"),
        (100.0, {"max_epochs": 9, "max_steps": 11}, "about 15 min"),  # 11 steps less 2, a 100 s
        (100.0, {"max_epochs": 1}, "about 7 min"),  # 4 batches of 100 s are left
        (15.0, {"max_epochs": 8}, "about 11 min"),  # 48 batches less 3: two are a pace after 30 s
        (0.1, {"max_epochs": 2}, ""),
    ],
)
def test_a_long_training_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_s: float, limits: dict, expected: str
) -> None:
    caplog.set_level(logging.INFO, "sparsepipe")
    clock = itertools.count(0.0, batch_s).__next__
    forecast = Forecast("scale=smoke takes minutes", clock=clock)
    plain_trainer(tmp_path, forecast, **limits).fit(Slow(), LOADER)
    said = [line for line in caplog.messages if "are left" in line]
    assert len(said) == bool(expected)
    hint = ": scale=smoke takes minutes"
    for line in said:
        assert expected in line
        assert line.endswith(hint) == ("about 7 min" not in line)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
