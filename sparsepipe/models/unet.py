"""The 3D U-Net.

Source: Çiçek, Abdulkadir, Lienkamp, Brox and Ronneberger, "3D U-Net: Learning Dense Volumetric
Segmentation from Sparse Annotation" (MICCAI 2016), section 2, but with padded convolutions, so that
each voxel gets a label.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Doubles a tensor's resolution, concatenates the tensor kept last, and convolves the two.

    With ``num_classes``, it computes logits in training, which it keeps before all other tensors.
    """

    def __init__(
        self,
        in_channels: int,
        skip_channels: int,
        *,
        checkpointing: bool,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(in_channels, in_channels, 2, stride=2, bias=False)
        self.block = nn.Sequential(
            *convolved(3, in_channels + skip_channels, skip_channels),
            *convolved(3, skip_channels, skip_channels),
        )
        self.score = nn.Conv3d(skip_channels, num_classes, 1) if num_classes else None
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
        kept = kept[:-1]
        if self.score is not None and self.training:
            kept = (self.score(result), *kept)
        return joined(result, kept)


class AtFullSize(nn.Module):
    """Interpolates all kept tensors, logits of lower resolutions, to the size of the first."""

    def forward(self, input: Value) -> Value:
        value, kept = parted(input)
        size = list(value.shape[2:])
        return joined(value, tuple(F.interpolate(k, size, mode="trilinear") for k in kept))


def unet3d(
    num_classes: int,
    *,
    in_channels: int = 1,
    head: Head = "segmentation",
    levels: int = 4,
    width: float = 1.0,
    dropout: float = 0.0,
    deep_supervision: bool = False,
    checkpointing: bool = False,
) -> nn.Sequential:
    """3D U-Net from [B, in_channels, D, H, W] to logits [B, num_classes, D, H, W], or for
    classification, which averages the last features over all voxels, [B, num_classes].

    D, H and W must be at least ``2 ** (levels - 1)``. ``levels``, the number of resolutions, is at
    least 2; other arguments are those of :func:`sparsepipe.models.cnn.cnn_nd`.

    With ``deep_supervision``, the result in training is a tuple of logits: those of the last layer,
    then those of the decoder's lower resolutions, the finer first, interpolated to [D, H, W].
    The lowest resolution, below the decoder, has none. Sources: Lee, Xie, Gallagher, Zhang and Tu,
    "Deeply-Supervised Nets" (AISTATS 2015); Isensee et al., "nnU-Net" (2021), methods.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    require(levels >= 2, "levels", levels, "2 or more")
    supervises = "true needs head=segmentation"
    require(not deep_supervision or head == "segmentation", "deep_supervision", True, supervises)
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
    for level, skip_channels in reversed(list(enumerate(skips[:-1]))):
        scored = num_classes if deep_supervision and level else None
        up = Up(channels, skip_channels, checkpointing=checkpointing, num_classes=scored)
        entries.append(up)
        channels = skip_channels
    if deep_supervision:
        last = ChainBlock(nn.Dropout(dropout), nn.Conv3d(channels, num_classes, 1))
        return nn.Sequential(*entries, last, AtFullSize())
    if head == "segmentation":
        return nn.Sequential(*entries, nn.Dropout(dropout), nn.Conv3d(channels, num_classes, 1))
    return nn.Sequential(*entries, *head_entries(head, 3, channels, num_classes, dropout=dropout))
