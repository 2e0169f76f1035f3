"""What a training that takes long says of itself where there is no terminal."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.callbacks import EpochLines
from sparsepipe.utils.progress import Silence
from tests.support.replay_cases import plain_trainer


class Slow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.05)
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
    assert any(" of 6 " in line and "left" in line for line in counted)
