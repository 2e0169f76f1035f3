"""Ranks that share volumes read their parts of the files, and train as one process does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsepipe.data import GeneratedVolumes, VolumeDataModule
from sparsepipe.strategies import SpatialStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared

SIZES = (10, 9, 14)


class Net(pl.LightningModule):
    """Classes of voxels, or of the whole."""

    def __init__(self, labels: str) -> None:
        super().__init__()
        self.labels = labels
        self.layers = nn.Sequential(
            *(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()),
            nn.Conv3d(4, 5, 3, padding=1),
        )
        self.losses: list[float] = []
        self.read: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found if self.labels == "voxel" else found.mean((2, 3, 4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        dataset = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        self.read.add(tuple(dataset[0, 0]["input"].shape))
        loss = F.cross_entropy(self(batch["input"]), batch["label"])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch["input"]), batch["label"])
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(rank: int, cache: Path, labels: str, ranks: int) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Net(labels)
    data = VolumeDataModule(
        source=functools.partial(GeneratedVolumes, sizes=SIZES, train_samples=8, test_samples=2),
        cache_dir=cache,
        labels=labels,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=0,
        val_share=0.25,
    )
    strategy: Any = "auto" if ranks == 1 else SpatialStrategy(grid="auto")
    trainer = pl.Trainer(
        **QUIET, max_epochs=2, devices=ranks, strategy=strategy, use_distributed_sampler=False
    )
    trainer.fit(net, datamodule=data)
    return {
        "weights": net.layers.state_dict(),
        "losses": net.losses,
        "val": float(trainer.callback_metrics["val"]),
        "read": net.read,
    }


@pytest.mark.parametrize("labels", ["sample", "voxel"])
def test_a_training_on_parts_equals_one_process(tmp_path: Path, labels: str) -> None:
    (expected,) = run_shared(trained, 1, tmp_path, labels, 1)
    assert expected["read"] == {(1, *SIZES)}
    for found in run_shared(trained, 2, tmp_path, labels, 2):
        assert found["read"] == {(1, 10, 9, 7)}, "the grid is along the longest dimension"
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4)
        for name, value in found["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=1e-4, atol=1e-5), name
