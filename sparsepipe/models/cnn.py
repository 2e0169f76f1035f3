"""A network of 5x5 convolutions on images, for studies of the pipeline's depth.

It maps images [B, in_channels, 28, 28] to logits [B, num_classes].

Source: Zhang and Sun, "A Parallel Pipeline Design for Training Deep Neural Networks", train a CNN
with 5x5 kernels on images of 28x28, in pipelines of up to eight stages. The number of layers,
their channels and the head, which the paper does not state, are our choice: 24 convolutions, all
but the first identical, after a pooling to 14x14. The first convolution with its ReLU and pooling
takes less time than the others (measured: assets/profiles/pipeline_depth/core.json), so that 12, 6
or 3 convolutions per stage balance 2, 4 or 8 stages. There is no normalisation, because it would
act on microbatches.
"""

from __future__ import annotations

import torch
from torch import nn

from sparsepipe.models.sizes import check_sizes, require, scaled

SIDE = 28
"""Pixels along each side of an image."""
_KERNEL = 5
_CHANNELS = 32
_RANDOM_SCALE = 0.1
"""Scale of the random part of the initial weights, which is added to the identity."""


def cnn_5x5(
    num_classes: int,
    *,
    in_channels: int = 1,
    convolutions: int = 24,
    width: float = 1.0,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Convolution, ReLU and pooling; further convolutions with ReLU; pooling and a linear layer.

    There are ``2 * convolutions + 5`` layers. Each convolution keeps height and width. The first
    one is initialised as in He et al. ("Delving Deep into Rectifiers"), the others near the
    identity (``nn.init.dirac_``): the output of so many random layers in a row would hardly
    depend on the input, and the network would not learn.

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of an image.
        convolutions: number of convolutions, at least 1.
        width: multiplies the 32 channels of every convolution.
        dropout: probability of the dropout before the last layer.

    Raises:
        ConfigError: an argument is out of its range.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    require(convolutions >= 1, "convolutions", convolutions, "1 or more")
    channels = scaled(_CHANNELS, width)
    entries: list[nn.Module] = []
    for before in [in_channels] + [channels] * (convolutions - 1):
        layer = nn.Conv2d(before, channels, _KERNEL, padding=_KERNEL // 2)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        if before == channels:
            with torch.no_grad():
                layer.weight.mul_(_RANDOM_SCALE)
                layer.weight.add_(nn.init.dirac_(torch.empty_like(layer.weight)))
        nn.init.zeros_(layer.bias)
        entries += [layer, nn.ReLU()] if entries else [layer, nn.ReLU(), nn.MaxPool2d(2)]
    features = channels * (SIDE // 4) ** 2
    head = nn.Linear(features, num_classes)
    return nn.Sequential(*entries, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), head)
