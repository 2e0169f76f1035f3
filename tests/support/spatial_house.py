"""Images to train on by shards from the command line, and a network that cannot be cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.models import cnn2d

EPOCHS = 3
IMAGES = (
    *("data=images", "data.source.sizes=[10,13]", "data.batch_size=4", "data.val_share=0.25"),
    *("data.source.train_samples=32", "data.source.test_samples=6"),
    *("model=cnn2d", "model.levels=2", "model.convolutions=1", "model.width=0.1"),
    *("model.dropout=0.3", f"trainer.max_epochs={EPOCHS}", "hardware=cores"),
)
SPATIAL = (*IMAGES, "parallel=spatial", "parallel.devices=2", "parallel.grid=[1,2]")


class Spectral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.fft(x).real


def spectral(*, class_names: Any, **settings: Any) -> nn.Sequential:
    return nn.Sequential(Spectral(), *cnn2d(**settings))
