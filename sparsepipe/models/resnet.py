"""Sparse ResNet-18, -34 and -50."""

from __future__ import annotations

from functools import partial

from torch import nn

from sparsepipe import sparse
from sparsepipe.models.chain import check_sizes, require, scaled

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
    """Computes ``relu(main(x) + shortcut(x))``; both must give the same sites and channels."""

    def __init__(self, main: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.main = main
        self.shortcut = shortcut
        self.relu = sparse.ReLU()

    def forward(self, x: sparse.SparseTensor) -> sparse.SparseTensor:
        out: sparse.SparseTensor = self.relu(sparse.add(self.main(x), self.shortcut(x)))
        return out


def sparse_resnet(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    width: float = 1.0,
    dropout: float = 0.0,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Builds sparse ResNet-18, -34 or -50 with 15, 23 or 23 entries: a residual block is one entry.

    Args:
        depth: number of layers with weights: 18, 34, or 50 with bottleneck blocks.
        num_classes: outputs of the last layer.
        in_channels: channels of the input features; 1 if they are just the constant 1.
        width: multiplies the channels of every hidden layer.
        dropout: probability of the dropout before the last layer.
        backend: backend of all layers; None: the native one.
    """
    require(depth in _BLOCKS, "depth", depth, f"one of {sorted(_BLOCKS)}")
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    has_bottlenecks = depth >= _BOTTLENECK_FROM

    def conv(before: int, after: int, size: int, stride: int = 1) -> nn.Module:
        # A strided window tiles the grid, so that both paths of a block have the same sites.
        size = stride if stride > 1 else size
        return sparse.Conv3d(before, after, size, stride=stride, backend=backend)

    def block(before: int, channels: int, stride: int) -> ResidualBlock:
        after = _EXPANSION * channels if has_bottlenecks else channels
        window = (1, 1) if has_bottlenecks else (3, stride)
        main = [conv(before, channels, *window), sparse.BatchNorm(channels), sparse.ReLU()]
        if has_bottlenecks:
            main += [conv(channels, channels, 3, stride), sparse.BatchNorm(channels), sparse.ReLU()]
        main += [conv(channels, after, 1 if has_bottlenecks else 3), sparse.BatchNorm(after)]
        shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            shortcut = nn.Sequential(conv(before, after, 1, stride), sparse.BatchNorm(after))
        return ResidualBlock(nn.Sequential(*main), shortcut)

    channels = scaled(_STAGE_CHANNELS[0], width)
    entries = [
        conv(in_channels, channels, 3),
        sparse.BatchNorm(channels),
        sparse.ReLU(),
        sparse.MaxPool3d(2, backend=backend),
    ]
    for stage, count in enumerate(_BLOCKS[depth]):
        inner = scaled(_STAGE_CHANNELS[stage], width)
        for number in range(count):
            entries.append(block(channels, inner, 2 if stage and not number else 1))
            channels = _EXPANSION * inner if has_bottlenecks else inner
    entries += [
        sparse.GlobalAvgPool(backend=backend),
        sparse.Dropout(dropout),
        sparse.Linear(channels, num_classes),
    ]
    return nn.Sequential(*entries)


sparse_resnet18 = partial(sparse_resnet, 18)
sparse_resnet34 = partial(sparse_resnet, 34)
sparse_resnet50 = partial(sparse_resnet, 50)
