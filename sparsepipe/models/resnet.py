"""Sparse ResNet18, 34 and 50; each residual block is one layer of the list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.models.sizes import check_sizes, scaled

_BLOCKS: dict[int, tuple[int, ...]] = {
    # depth: residual blocks in each of the four stages
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
}
_STAGE_CHANNELS = (64, 128, 256, 512)
_BOTTLENECK_FROM = 50
_EXPANSION = 4


class ResidualBlock(nn.Module):
    """``relu(main(x) + shortcut(x))``.

    Args:
        main: layers that end with a norm.
        shortcut: the identity, or layers that produce the same sites and channels.
    """

    def __init__(self, main: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.main = main
        self.shortcut = shortcut
        self.relu = sparse.ReLU()

    def forward(self, x: sparse.SparseTensor) -> sparse.SparseTensor:
        """Add both paths and apply the ReLU."""
        out: sparse.SparseTensor = self.relu(sparse.add(self.main(x), self.shortcut(x)))
        return out


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Builds residual blocks, whose layers share one backend."""

    backend: sparse.Backend | None

    def conv(self, in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Module:
        # A strided window tiles the grid, so that both paths of a block have the same sites.
        size = stride if stride > 1 else size
        return sparse.Conv3d(in_channels, out_channels, size, stride=stride, backend=self.backend)

    def basic(self, in_channels: int, channels: int, stride: int) -> ResidualBlock:
        main = nn.Sequential(
            self.conv(in_channels, channels, 3, stride),
            sparse.BatchNorm(channels),
            sparse.ReLU(),
            self.conv(channels, channels, 3),
            sparse.BatchNorm(channels),
        )
        return ResidualBlock(main, self._shortcut(in_channels, channels, stride))

    def bottleneck(self, in_channels: int, channels: int, stride: int) -> ResidualBlock:
        out_channels = _EXPANSION * channels
        main = nn.Sequential(
            self.conv(in_channels, channels, 1),
            sparse.BatchNorm(channels),
            sparse.ReLU(),
            self.conv(channels, channels, 3, stride),
            sparse.BatchNorm(channels),
            sparse.ReLU(),
            self.conv(channels, out_channels, 1),
            sparse.BatchNorm(out_channels),
        )
        return ResidualBlock(main, self._shortcut(in_channels, out_channels, stride))

    def _shortcut(self, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        if stride == 1 and in_channels == out_channels:
            return nn.Identity()
        return nn.Sequential(
            self.conv(in_channels, out_channels, 1, stride), sparse.BatchNorm(out_channels)
        )


def sparse_resnet(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    width: float = 1.0,
    dropout: float = 0.0,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Sparse ResNet of ``depth`` 18, 34 or 50: 15, 23 or 23 layers.

    Args:
        depth: number of layers with weights; 50 has bottleneck blocks.
        num_classes: outputs of the last layer.
        in_channels: channels of the input feature (the constant 1 has one).
        width: multiplies the channels of every hidden layer.
        dropout: probability of the dropout before the last layer.
        backend: backend of all layers; None is the native one.

    Raises:
        ConfigError: an unknown depth, a width that is not positive, a dropout outside [0, 1),
            or no channels or classes.
    """
    if depth not in _BLOCKS:
        raise ConfigError(
            f"there is no ResNet of depth {depth}", remedy=f"choose one of {sorted(_BLOCKS)}"
        )
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    blocks = _Blocks(backend)
    channels = scaled(_STAGE_CHANNELS[0], width)
    entries = [
        blocks.conv(in_channels, channels, 3),
        sparse.BatchNorm(channels),
        sparse.ReLU(),
        sparse.MaxPool3d(2, backend=backend),
    ]
    make = blocks.bottleneck if depth >= _BOTTLENECK_FROM else blocks.basic
    expansion = _EXPANSION if depth >= _BOTTLENECK_FROM else 1
    for stage_channels, stride in _steps(depth, width):
        entries.append(make(channels, stage_channels, stride))
        channels = expansion * stage_channels
    entries += [
        sparse.GlobalAvgPool(),
        sparse.Dropout(dropout),
        sparse.Linear(channels, num_classes),
    ]
    return nn.Sequential(*entries)


def _steps(depth: int, width: float) -> Iterator[tuple[int, int]]:
    """Channels and stride of each block; all stages but the first begin with stride 2."""
    for stage, (count, channels) in enumerate(zip(_BLOCKS[depth], _STAGE_CHANNELS, strict=True)):
        for number in range(count):
            yield scaled(channels, width), 2 if stage and not number else 1


sparse_resnet18 = partial(sparse_resnet, 18)
sparse_resnet34 = partial(sparse_resnet, 34)
sparse_resnet50 = partial(sparse_resnet, 50)
