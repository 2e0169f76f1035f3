"""DenseNet for volumes.

Source: Huang, Liu, van der Maaten and Weinberger, "Densely Connected Convolutional Networks" (CVPR
2017), section 3, DenseNet-BC with compression 0.5, in three dimensions. By default DenseNet-121.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sparsepipe.models.chain import (
    ENTRY_KEEP,
    ChainBlock,
    Head,
    Value,
    check_sizes,
    head_entries,
    joined,
    parted,
    recomputed,
    require,
    scaled,
)

_GROWTH = 32
_BOTTLENECK = 4
_DENSENET_121 = (6, 12, 24, 16)


class DenseLayer(nn.Module):
    """Appends ``growth`` channels of new features to its input."""

    def __init__(self, in_channels: int, growth: int, *, checkpointing: bool) -> None:
        super().__init__()
        hidden = _BOTTLENECK * growth
        self.layers = nn.Sequential(
            nn.BatchNorm3d(in_channels),
            nn.ReLU(),
            _convolution(in_channels, hidden, 1),
            nn.BatchNorm3d(hidden),
            nn.ReLU(),
            _convolution(hidden, growth, 3),
        )
        self.checkpointing = checkpointing

    def forward(self, input: Value) -> Value:
        """Maps [B, in_channels, D, H, W] to [B, in_channels + growth, D, H, W]."""
        value, kept = parted(input)
        run = partial(recomputed, self, self.layers) if self.checkpointing else self.layers
        new: Tensor = run(value)
        return joined(torch.cat((value, new), 1), kept)


def _convolution(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> nn.Conv3d:
    layer = nn.Conv3d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
    )
    nn.init.kaiming_normal_(layer.weight)
    return layer


def densenet3d(
    num_classes: int,
    *,
    in_channels: int = 1,
    head: Head = "classification",
    blocks: Sequence[int] = _DENSENET_121,
    width: float = 1.0,
    dropout: float = 0.0,
    checkpointing: bool = False,
) -> nn.Sequential:
    """DenseNet from [B, in_channels, D, H, W] to logits [B, num_classes], or for segmentation
    [B, num_classes, D, H, W]; each dense layer is one entry.

    D, H and W must be at least ``2 ** (len(blocks) + 1)``. ``blocks`` lists the number of layers of
    each dense block; ``width`` multiplies the growth rate of 32 and the 64 channels before the
    first block. Other arguments are those of :func:`sparsepipe.models.cnn.cnn_nd`.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    valid = "the number of layers of each dense block, such as [6, 12, 24, 16]"
    require(bool(blocks) and min(blocks) >= 1, "blocks", blocks, valid)
    growth = scaled(_GROWTH, width)
    channels = 2 * growth
    entries: list[nn.Module] = [
        ChainBlock(
            _convolution(in_channels, channels, 7, stride=2),
            nn.BatchNorm3d(channels),
            nn.ReLU(),
            keep=ENTRY_KEEP[head],
            checkpointing=checkpointing,
            least=2 ** (len(blocks) + 1),
        ),
        ChainBlock(nn.MaxPool3d(3, stride=2, padding=1)),
    ]
    for number, layers in enumerate(blocks):
        if number:
            transition = [
                nn.BatchNorm3d(channels),
                nn.ReLU(),
                _convolution(channels, channels // 2, 1),
                nn.AvgPool3d(2),
            ]
            entries.append(ChainBlock(*transition, checkpointing=checkpointing))
            channels //= 2
        for _ in range(layers):
            entries.append(DenseLayer(channels, growth, checkpointing=checkpointing))
            channels += growth
    entries.append(ChainBlock(nn.BatchNorm3d(channels), nn.ReLU(), checkpointing=checkpointing))
    return nn.Sequential(*entries, *head_entries(head, 3, channels, num_classes, dropout=dropout))
