"""Images to train on by shards from the command line, and networks and data that cannot be cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.data import VolumeDataModule
from sparsepipe.models import cnn2d
from sparsepipe.runtime.collectives import process_group

EPOCHS = 3
IMAGES = (
    *("data=images", "data.source.sizes=[10,13]", "data.batch_size=4", "data.val_share=0.25"),
    *("data.source.train_samples=32", "data.source.test_samples=6"),
    *("model=cnn2d", "model.levels=2", "model.convolutions=1", "model.width=0.1"),
    *("model.dropout=0.3", f"trainer.max_epochs={EPOCHS}", "hardware=cores"),
)
SPATIAL = (*IMAGES, "parallel=spatial", "parallel.devices=2", "parallel.grid=[1,2]")


class Residual(nn.Module):
    """Adds what another module makes of its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Rolled(nn.Module):
    """Calls a function that needs more than one position of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x, 1, -1)


def attentive(*, class_names: Any, **settings: Any) -> nn.Sequential:
    return nn.Sequential(Residual(nn.MultiheadAttention(4, 2)), *cnn2d(**settings))


def rolled(*, class_names: Any, **settings: Any) -> nn.Sequential:
    return nn.Sequential(Residual(Rolled()), *cnn2d(**settings))


class UnlikeImages(VolumeDataModule):
    """Each rank has labels of its own."""

    def _collate(self) -> Any:
        collate = super()._collate()

        def unlike(samples: Any) -> dict[str, Any]:
            batch = collate(samples)
            batch["label"] = (batch["label"] + process_group.rank()) % self.num_classes
            return batch

        return unlike
