"""Plain convolutional networks on signals, images and volumes: cnn1d, cnn2d, cnn3d.

Source of the names: Tsaris and Hinkle, "Distributed Training for High Resolution Images: A Domain
and Spatial Decomposition Approach", train a CNN1D, a CNN2D and a CNN3D on samples that are cut over
a grid of workers. Depth, channels and heads are our choice: levels of convolutions, with a max pool
between two levels and twice as many channels behind it.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from sparsepipe.models.chain import MAX_POOLS, Block, Head, convolved, entry_keep, head_entries
from sparsepipe.models.sizes import check_sizes, require, scaled

_CHANNELS = 32


def cnn_nd(
    dimensions: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    head: Head = "classification",
    levels: int = 3,
    convolutions: int = 2,
    kernel_size: int = 3,
    width: float = 1.0,
    dropout: float = 0.0,
    checkpointing: bool = False,
) -> nn.Sequential:
    """Convolutions with batch norm and ReLU, max pools between levels, and a head.

    It maps [B, in_channels, *spatial] to logits [B, num_classes], or [B, num_classes, *spatial].
    The spatial size may be any of at least ``2 ** (levels - 1)``.

    Args:
        dimensions: spatial ones, 1 to 3.
        num_classes: K.
        in_channels: channels of a sample.
        head: ``classification`` or ``segmentation``.
        levels: one more than there are max pools.
        convolutions: of each level.
        kernel_size: of all convolutions but the last, odd.
        width: multiplies the 32 channels of the first level.
        dropout: probability of the dropout before the last layer.
        checkpointing: keep the input of each convolution's block only.

    Raises:
        ConfigError: an argument is out of its range.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    require(levels >= 1, "levels", levels, "1 or more")
    require(convolutions >= 1, "convolutions", convolutions, "1 or more")
    require(kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number")
    entries: list[nn.Module] = []
    channels = in_channels
    for level in range(levels):
        if level:
            entries.append(Block(MAX_POOLS[dimensions](2)))
        out_channels = scaled(_CHANNELS * 2**level, width)
        for _ in range(convolutions):
            layers = convolved(dimensions, channels, out_channels, kernel_size)
            keep, least = None if entries else entry_keep(head), 1 if entries else 2 ** (levels - 1)
            entries.append(Block(*layers, keep=keep, checkpointing=checkpointing, least=least))
            channels = out_channels
    return nn.Sequential(
        *entries, *head_entries(head, dimensions, channels, num_classes, dropout=dropout)
    )


cnn1d = partial(cnn_nd, 1)
cnn2d = partial(cnn_nd, 2)
cnn3d = partial(cnn_nd, 3)
