"""The fully convolutional network FCN-8s for images.

Source: Long, Shelhamer and Darrell, "Fully Convolutional Networks for Semantic Segmentation"
(CVPR 2015), section 4.2, but with padded convolutions and a batch norm after each, since training
starts without weights from ImageNet.
"""

from __future__ import annotations

import torch
from torch import nn

from sparsepipe.models.chain import (
    ENTRY_KEEP,
    ChainBlock,
    Head,
    Value,
    check_sizes,
    convolved,
    joined,
    parted,
    scaled,
)

_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Number of convolutions before each pool, and their channels."""
_LEAST = 2 ** len(_BLOCKS)
"""Smallest height and width of an image, in pixels."""
_SKIPS = (3, 4)
"""Pools, counted from 1, whose outputs are kept as skips."""
_FULL = 4096


class UpScore(nn.Module):
    """Upsamples scores by ``factor`` to the size of the tensor kept last, which it drops; with
    ``skip_channels``, the number of channels of that tensor, adds scores computed from it.
    """

    def __init__(self, num_classes: int, *, factor: int, skip_channels: int | None = None) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(
            num_classes, num_classes, 2 * factor, stride=factor, padding=factor // 2, bias=False
        )
        taps = 1 - (torch.arange(2 * factor) + 0.5 - factor).abs() / factor
        each = torch.arange(num_classes)
        with torch.no_grad():  # bilinear interpolation of each class
            self.up.weight.zero_()
            self.up.weight[each, each] = taps[:, None] * taps
        self.score = None if skip_channels is None else nn.Conv2d(skip_channels, num_classes, 1)
        if self.score is not None:
            for parameter in self.score.parameters():
                nn.init.zeros_(parameter)

    def forward(self, input: Value) -> Value:
        """Returns scores [B, K, *spatial] at the kept tensor's spatial size, which may be odd."""
        value, kept = parted(input)
        result = self.up(value, output_size=list(kept[-1].shape[2:]))
        if self.score is not None:
            result = result + self.score(kept[-1])
        return joined(result, kept[:-1])


def fcn2d(
    num_classes: int,
    *,
    in_channels: int = 3,
    head: Head = "segmentation",
    width: float = 1.0,
    dropout: float = 0.5,
    batch_norm: bool = True,
    checkpointing: bool = False,
) -> nn.Sequential:
    """FCN-8s from [B, in_channels, H, W] to logits [B, num_classes, H, W] or [B, num_classes].

    Height and width must be at least 32. For classification, the coarse scores are averaged and
    there are no skips.

    ``batch_norm`` adds a batch norm after each convolution except those that compute scores. Other
    arguments are those of :func:`sparsepipe.models.cnn.cnn_nd`.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    is_dense = head == "segmentation"
    entries: list[nn.Module] = []
    channels, kept = in_channels, []
    for number, (count, block_channels) in enumerate(_BLOCKS, 1):
        out_channels = scaled(block_channels, width)
        for _ in range(count):
            layers = convolved(2, channels, out_channels, norm=batch_norm)
            keep, least = None if entries else ENTRY_KEEP[head], 1 if entries else _LEAST
            entries.append(ChainBlock(*layers, keep=keep, checkpointing=checkpointing, least=least))
            channels = out_channels
        is_kept = is_dense and number in _SKIPS
        entries.append(ChainBlock(nn.MaxPool2d(2), keep="output" if is_kept else None))
        kept.append(channels)
    hidden = scaled(_FULL, width)
    for kernel_size in (7, 1):
        layers = convolved(2, channels, hidden, kernel_size, norm=batch_norm)
        entries.append(ChainBlock(*layers, nn.Dropout(dropout), checkpointing=checkpointing))
        channels = hidden
    entries.append(ChainBlock(nn.Conv2d(channels, num_classes, 1)))
    if not is_dense:
        return nn.Sequential(*entries, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for number in reversed(_SKIPS):
        entries.append(UpScore(num_classes, factor=2, skip_channels=kept[number - 1]))
    return nn.Sequential(*entries, UpScore(num_classes, factor=2 ** _SKIPS[0]))
