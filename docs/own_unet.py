"""A U-Net of one's own whose images are cut over two devices, in one file without Hydra."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsepipe.strategies import SpatialStrategy


class UNet(pl.LightningModule):  # noqa: D101
    def __init__(self) -> None:
        super().__init__()
        self.first, self.low = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        high = nn.functional.relu(self.first(batch[0]))
        low = nn.functional.relu(self.low(nn.functional.max_pool2d(high, 2)))
        return nn.functional.cross_entropy(self.last(torch.cat([high, self.up(low)], 1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)  # every rank makes the same images, and cuts out its own shard
images = torch.randn(16, 1, 64, 64)
loader = DataLoader(TensorDataset(images, (images[:, 0] > 0).long()), batch_size=4)
strategy = SpatialStrategy(grid=(1, 2))
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=3)
trainer.fit(UNet(), loader)
