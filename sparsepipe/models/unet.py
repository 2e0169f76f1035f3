"""The 3D U-Net.

Source: Çiçek, Abdulkadir, Lienkamp, Brox and Ronneberger, "3D U-Net: Learning Dense Volumetric
Segmentation from Sparse Annotation" (MICCAI 2016), section 2, but with padded convolutions, so that
each voxel gets a label.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsepipe.models.chain import (
    ChainBlock,
    Head,
    Value,
    check_sizes,
    convolved,
    head_entries,
    joined,
    parted,
    recomputed,
    require,
    scaled,
)

_CHANNELS = 32


class Up(nn.Module):
    """Doubles a tensor's resolution, concatenates the tensor kept last, and convolves the two."""

    def __init__(self, in_channels: int, skip_channels: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(in_channels, in_channels, 2, stride=2, bias=False)
        self.block = nn.Sequential(
            *convolved(3, in_channels + skip_channels, skip_channels),
            *convolved(3, skip_channels, skip_channels),
        )
        self.checkpointing = checkpointing

    def forward(self, input: Value) -> Value:
        """Returns a tensor of the kept tensor's shape, whose spatial sizes may be odd."""
        value, kept = parted(input)
        skip = kept[-1]

        def merged(value: Tensor, skip: Tensor) -> Tensor:
            raised = self.up(value, output_size=list(skip.shape[2:]))
            result: Tensor = self.block(torch.cat((skip, raised), 1))
            return result

        result = (
            recomputed(self, merged, value, skip) if self.checkpointing else merged(value, skip)
        )
        return joined(result, kept[:-1])


def unet3d(
    num_classes: int,
    *,
    in_channels: int = 1,
    head: Head = "segmentation",
    levels: int = 4,
    width: float = 1.0,
    dropout: float = 0.0,
    checkpointing: bool = False,
) -> nn.Sequential:
    """3D U-Net from [B, in_channels, D, H, W] to logits [B, num_classes, D, H, W], or for
    classification, which averages the last features over all voxels, [B, num_classes].

    D, H and W must be at least ``2 ** (levels - 1)``. ``levels``, the number of resolutions, is at
    least 2; other arguments are those of :func:`sparsepipe.models.cnn.cnn_nd`.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    require(levels >= 2, "levels", levels, "2 or more")
    entries: list[nn.Module] = []
    channels, skips = in_channels, []
    for level in range(levels):
        if level:
            entries.append(ChainBlock(nn.MaxPool3d(2)))
        first, second = (scaled(_CHANNELS * 2**n, width) for n in (level, level + 1))
        layers = [*convolved(3, channels, first), *convolved(3, first, second)]
        entries.append(
            ChainBlock(
                *layers,
                keep="output" if level + 1 < levels else None,
                checkpointing=checkpointing,
                least=2 ** (levels - 1 - level),
            )
        )
        skips.append(second)
        channels = second
    for skip_channels in reversed(skips[:-1]):
        entries.append(Up(channels, skip_channels, checkpointing=checkpointing))
        channels = skip_channels
    if head == "segmentation":
        return nn.Sequential(*entries, nn.Dropout(dropout), nn.Conv3d(channels, num_classes, 1))
    return nn.Sequential(*entries, *head_entries(head, 3, channels, num_classes, dropout=dropout))
