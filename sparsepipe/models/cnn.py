"""A plain network of 5x5 convolutions on images, for studies of a pipeline's depth.

It maps images [B, in_channels, 28, 28] to logits [B, num_classes].

Source: Zhang and Sun, "A Parallel Pipeline Design for Training Deep Neural Networks", train a CNN
with 5x5 kernels on images of 28x28, in pipelines of up to eight. Where that is silent, as on the
number of layers, their channels and the head, this is our choice: 24 convolutions, of which all
but the first one are alike, behind a pooling that leaves 14x14. With ReLU and pooling the first one
takes less than another (measured: assets/profiles/pipeline_depth/core.json); so twelve, six and
three in a stage are nearly equal shares of two, four and eight stages. There is no normalization,
which would see microbatches.
"""

from __future__ import annotations

import torch
from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.models.sizes import check_sizes, scaled

SIDE = 28
"""Pixels along each side of an image."""
_KERNEL = 5
_CHANNELS = 32
_VARIED = 0.1
"""How large the random part of weights is at first, beside that which hands on what comes in."""


def cnn_5x5(
    num_classes: int,
    *,
    in_channels: int = 1,
    convolutions: int = 24,
    width: float = 1.0,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Convolution, ReLU and pooling; convolution and ReLU again and again; pooling, linear layer.

    Each convolution keeps height and width. The first one begins as He et al. ("Delving Deep into
    Rectifiers") have it, those that are alike near the identity (``nn.init.dirac_``): so many in a
    row, all random, would hand on the same whatever they get, and not learn. There are
    ``2 * convolutions + 5`` layers.

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of an image.
        convolutions: how many, one at least.
        width: multiplies the 32 channels of every convolution.
        dropout: before the last layer.

    Raises:
        ConfigError: no convolutions, a width that is not positive, a dropout outside [0, 1).
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    if convolutions < 1:
        raise ConfigError(
            f"model.convolutions is {convolutions}", remedy="choose 1 convolution or more"
        )
    channels = scaled(_CHANNELS, width)
    entries: list[nn.Module] = [_convolution(in_channels, channels), nn.ReLU(), nn.MaxPool2d(2)]
    for _ in range(convolutions - 1):
        entries += [_convolution(channels, channels), nn.ReLU()]
    features = channels * (SIDE // 4) ** 2
    entries += [
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(features, num_classes),
    ]
    return nn.Sequential(*entries)


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    layer = nn.Conv2d(in_channels, out_channels, _KERNEL, padding=_KERNEL // 2)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    assert layer.bias is not None
    if in_channels == out_channels:
        with torch.no_grad():
            layer.weight.mul_(_VARIED)
            layer.weight.add_(nn.init.dirac_(torch.empty_like(layer.weight)))
    nn.init.zeros_(layer.bias)
    return layer
