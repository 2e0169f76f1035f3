"""Plain convolutional networks: cnn_5x5 for pipelines; cnn1d, cnn2d, cnn3d for grids of ranks.

Sources: Zhang and Sun, "A Parallel Pipeline Design for Training Deep Neural Networks"; Tsaris and
Hinkle, "Distributed Training for High Resolution Images". Depth, channels and heads are our choice.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sparsepipe.models.chain import (
    ENTRY_KEEP,
    MAX_POOLS,
    ChainBlock,
    Head,
    check_sizes,
    convolved,
    head_entries,
    require,
    scaled,
)

SIDE = 28
"""Pixels along each side of an image of :func:`cnn_5x5`."""
_KERNEL = 5
_CHANNELS = 32
_RANDOM_SCALE = 0.1
"""Factor of the random initial weights, to which the identity kernel is added."""


def cnn_5x5(
    num_classes: int,
    *,
    in_channels: int = 1,
    convolutions: int = 24,
    width: float = 1.0,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Builds a network that maps images [B, in_channels, 28, 28] to logits [B, num_classes].

    It has ``2 * convolutions + 5`` layers. All convolutions except the first have the same size, 32
    times ``width`` channels on 14 x 14 pixels, so that stages with equally many of them are
    balanced. There is no normalisation, since it would act on microbatches. The first convolution
    is initialised as in He et al. ("Delving Deep into Rectifiers"), the others near the identity
    (``nn.init.dirac_``), since so many random layers would not learn.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    require(convolutions >= 1, "convolutions", convolutions, "1 or more")
    channels = scaled(_CHANNELS, width)
    entries: list[nn.Module] = []
    for before in [in_channels] + [channels] * (convolutions - 1):
        layer = nn.Conv2d(before, channels, _KERNEL, padding=_KERNEL // 2)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        if entries:
            with torch.no_grad():
                layer.weight.mul_(_RANDOM_SCALE)
                layer.weight.add_(nn.init.dirac_(torch.empty_like(layer.weight)))
        nn.init.zeros_(layer.bias)
        entries += [layer, nn.ReLU()] if entries else [layer, nn.ReLU(), nn.MaxPool2d(2)]
    features = channels * (SIDE // 4) ** 2
    head = nn.Linear(features, num_classes)
    return nn.Sequential(*entries, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), head)


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
    """Builds a network of convolutions with batch norm, max pools between levels, and a head.

    It maps [B, in_channels, *spatial] to logits [B, num_classes], or [B, num_classes, *spatial] for
    segmentation. Each spatial size must be at least ``2 ** (levels - 1)``.

    Args:
        dimensions: number of spatial dimensions, 1 to 3.
        num_classes: number of classes.
        in_channels: channels of a sample.
        head: ``classification`` or ``segmentation``.
        levels: number of resolutions; a max pool leads to the next, which has twice the channels.
        convolutions: number of convolutions in each level.
        kernel_size: odd kernel size of all convolutions except the head's.
        width: multiplies the 32 channels of the first level.
        dropout: probability of the dropout before the last layer.
        checkpointing: whether to keep only the input of each convolution's block, and to compute
            the block again in the backward pass.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    require(levels >= 1, "levels", levels, "1 or more")
    require(convolutions >= 1, "convolutions", convolutions, "1 or more")
    require(kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number")
    entries: list[nn.Module] = []
    channels = in_channels
    for level in range(levels):
        if level:
            entries.append(ChainBlock(MAX_POOLS[dimensions](2)))
        out_channels = scaled(_CHANNELS * 2**level, width)
        for _ in range(convolutions):
            layers = convolved(dimensions, channels, out_channels, kernel_size)
            keep, least = None if entries else ENTRY_KEEP[head], 1 if entries else 2 ** (levels - 1)
            entries.append(ChainBlock(*layers, keep=keep, checkpointing=checkpointing, least=least))
            channels = out_channels
    return nn.Sequential(
        *entries, *head_entries(head, dimensions, channels, num_classes, dropout=dropout)
    )


cnn1d = partial(cnn_nd, 1)
cnn2d = partial(cnn_nd, 2)
cnn3d = partial(cnn_nd, 3)
