"""The networks and samples of the benchmark of spatial parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


def _cnn2d(width: float) -> nn.Sequential:
    channels, layers = round(32 * width), list[nn.Module]()
    for level in range(3):
        for number in range(2):
            before = 1 if not level and not number else channels * 2 ** max(level - 1 + number, 0)
            after = channels * 2**level
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels * 4, CLASSES)]
    return nn.Sequential(*layers)


class _Level(nn.Module):
    """A level of a U-Net with those below it."""

    def __init__(self, inputs: int, channels: int, below: int) -> None:
        super().__init__()
        self.before = self._block(inputs, channels)
        self.below: nn.Module | None = None
        if below:
            self.pool = nn.MaxPool3d(2)
            self.below = _Level(channels, 2 * channels, below - 1)
            self.up = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
            self.after = self._block(2 * channels, channels)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, padding=1),
            nn.BatchNorm3d(outputs),
            nn.ReLU(),
            nn.Conv3d(outputs, outputs, 3, padding=1),
            nn.BatchNorm3d(outputs),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip: Tensor = self.before(x)
        if self.below is None:
            return skip
        merged: Tensor = self.after(torch.cat([skip, self.up(self.below(self.pool(skip)))], 1))
        return merged


def _unet3d(width: float) -> nn.Sequential:
    channels = round(32 * width)
    return nn.Sequential(
        _Level(1, channels, 3),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(channels, CLASSES),
    )


class _LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _NextBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            _LayerNorm2d(channels, eps=1e-6),
            nn.Conv2d(channels, 4 * channels, 1),
            nn.GELU(),
            nn.Conv2d(4 * channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.branch(x)
        return output


def _convnext_tiny(width: float) -> nn.Sequential:
    channels = [round(each * width) for each in (96, 192, 384, 768)]
    layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, 4), _LayerNorm2d(channels[0])]
    for stage, (size, blocks) in enumerate(zip(channels, (3, 3, 9, 3), strict=True)):
        if stage:
            before = channels[stage - 1]
            layers += [_LayerNorm2d(before), nn.Conv2d(before, size, 2, 2)]
        layers += [_NextBlock(size) for _ in range(blocks)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES)]
    return nn.Sequential(*layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A network, and samples of noise: what it learns takes no other time.

    Args:
        name: of the network.
        width: multiplies its channels.
        channels: of a sample.
        size: of it.
        batch_size: B.
    """

    name: str
    width: float
    channels: int
    size: tuple[int, ...]
    batch_size: int = 1

    def __str__(self) -> str:
        size = " x ".join(map(str, self.size))
        return f"{self.name} of width {self.width:g} at {size}, {self.batch_size} a minibatch"

    @property
    def grid(self) -> tuple[int, ...]:
        """Of two ranks: the last dimension is cut."""
        return (*[1] * (len(self.size) - 1), 2)

    def layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        return _MODELS[self.name][0](self.width)

    def input(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.rand(self.batch_size, self.channels, *self.size, generator=generator)


_Model = tuple[Callable[[float], nn.Sequential], int, tuple[int, ...], tuple[int, ...]]
_MODELS: dict[str, _Model] = {
    "cnn2d": (_cnn2d, 1, (1024, 1024), (64, 96)),
    "unet3d": (_unet3d, 1, (96, 96, 96), (16, 16, 32)),
    "convnext_tiny": (_convnext_tiny, 3, (512, 1024), (64, 128)),
}
"""Of each name: the network, the channels and the size of a sample, and a small size."""

NAMES = tuple(_MODELS)


def workload(name: str, *, quick: bool, width: float) -> Sample:
    """A network with its sample.

    Args:
        name: one of :data:`NAMES`.
        quick: a small sample.
        width: multiplies the channels.
    """
    _, channels, size, small = _MODELS[name]
    return Sample(
        name=name,
        width=0.25 if quick else width,
        channels=channels,
        size=small if quick else size,
    )
