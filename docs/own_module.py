"""A LightningModule of your own in a pipeline of two stages; see the README."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsepipe.strategies  # noqa: F401  registers sparsepipe_async


class Own(pl.LightningModule):  # noqa: D101
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


inputs = torch.randn(256, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
trainer = pl.Trainer(strategy="sparsepipe_async", accelerator="cpu", devices=2, max_epochs=3)
trainer.fit(Own(), loader)
