"""Small networks for tests of spatial parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def chain(convolutions: int, *, channels: int = 2) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv3d(channels, channels, 3, padding=1) for _ in range(convolutions))
    )


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv3d(outputs, outputs, 3, padding=1),
        nn.BatchNorm3d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels in three dimensions with batch norms, a pool, an upsampling and a skip."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.down = _block(2, channels)
        self.pool = nn.MaxPool3d(2)
        self.bottom = _block(channels, 2 * channels)
        self.up = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.join = _block(2 * channels, channels)
        self.head = nn.Conv3d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        below = self.up(self.bottom(self.pool(skip)))
        output: Tensor = self.head(self.join(torch.cat([skip, below], 1)))
        return output


class Classifier2d(nn.Module):
    """Norms of all kinds, a channel's dropout, a pool, and a head with a batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.GroupNorm(2, 8),
            nn.GELU(),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.features(x))
        return output
