"""Sparse U-Nets, which label every voxel of a scene: MinkUNet-14, -18, -34 and SpUNet.

Sources: Choy, Gwak and Savarese, "4D Spatio-Temporal ConvNets: Minkowski Convolutional Neural
Networks" (CVPR 2019), with the channels of ``examples/minkunet.py`` of MinkowskiEngine 0.5.4; and
SpUNet-v1m1 of Pointcept 1.6, which builds on spconv.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

from torch import nn

from sparsepipe import sparse
from sparsepipe.models.chain import ChainBlock, check_sizes, require, scaled
from sparsepipe.models.resnet import Up, chained, residual_block

Widening = Literal["block", "downsampling"]
"""Which layer of a level on the way down changes the channels: its first residual block, or the
strided convolution before it. MinkUNet has the former, SpUNet the latter."""


def _check(
    channels: Sequence[int], blocks: Sequence[int], stem: Sequence[int], widening: str
) -> None:
    valid = "an even number of levels' channels, half of them to go down"
    require(len(channels) > 0 and len(channels) % 2 == 0, "channels", channels, valid)
    valid = f"the number of residual blocks of each of {len(channels)} levels, 1 or more"
    require(len(blocks) == len(channels) and min(blocks) >= 1, "blocks", blocks, valid)
    valid = "odd sizes, such as [5] or [3, 3]"
    require(bool(stem) and all(k % 2 for k in stem), "stem", stem, valid)
    require(widening in get_args(Widening), "widening", widening, f"one of {get_args(Widening)}")


def sparse_unet(
    num_classes: int,
    *,
    in_channels: int,
    channels: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
    blocks: Sequence[int] = (2, 2, 2, 2, 2, 2, 2, 2),
    stem: Sequence[int] = (5,),
    stem_channels: int = 32,
    widening: Widening = "block",
    norm_eps: float = 1e-5,
    norm_momentum: float = 0.1,
    width: float = 1.0,
    dropout: float = 0.0,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Builds a U-Net from features [N, in_channels] to logits [N, num_classes] on the same sites.

    Half of the levels lead down, each by a convolution of size and stride 2, and half lead back, by
    its inverse, to features that are joined with those of the same sites on the way down. The stem,
    a strided or inverse convolution, and a residual block are one entry each.

    Args:
        num_classes: outputs of the last layer.
        in_channels: channels of the input features.
        channels: channels of each level, those of the way down first; an even number of levels.
        blocks: number of residual blocks of each level, in the same order.
        stem: odd sizes of the convolutions on the sites of the input, before the first level.
        stem_channels: their channels.
        widening: see :data:`Widening`.
        norm_eps: what batch norms add to the variance.
        norm_momentum: share of a batch in the running statistics of batch norms.
        width: multiplies the channels of every hidden layer.
        dropout: probability of the dropout before the last layer.
        backend: backend of all layers; None: the default one.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    _check(channels, blocks, stem, widening)
    half = len(channels) // 2
    norm = partial(sparse.BatchNorm, eps=norm_eps, momentum=norm_momentum)
    block = partial(residual_block, norm=norm, backend=backend)

    def unit(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
        convolution = sparse.Conv3d(before, after, size, stride=stride, backend=backend)
        return [convolution, norm(after), sparse.ReLU(inplace=True)]

    def run(before: int, after: int, count: int) -> list[nn.Module]:
        return [block(after if number else before, after) for number in range(count)]

    sizes = [scaled(each, width) for each in (stem_channels, *channels)]
    layers = unit(in_channels, sizes[0], stem[0])
    for size in stem[1:]:
        layers += unit(sizes[0], sizes[0], size)
    levels: list[list[nn.Module]] = [[nn.Sequential(*layers)]]
    for level in range(half):
        before, after = sizes[level], sizes[level + 1]
        between = after if widening == "downsampling" else before
        down = nn.Sequential(*unit(before, between, 2, stride=2))
        levels.append([down, *run(between, after, blocks[level])])
    entries = chained(levels)
    for level in range(half, len(channels)):
        before, after, skip = sizes[level], sizes[level + 1], sizes[len(channels) - level - 1]
        entries.append(Up(before, after, norm=norm, backend=backend))
        entries += map(ChainBlock, run(after + skip, after, blocks[level]))
    return nn.Sequential(*entries, sparse.Dropout(dropout), sparse.Linear(sizes[-1], num_classes))


minkunet14 = partial(sparse_unet, blocks=(1,) * 8)
minkunet18 = partial(sparse_unet, blocks=(2,) * 8)
minkunet34 = partial(sparse_unet, blocks=(2, 3, 4, 6, 2, 2, 2, 2))
spunet = partial(
    sparse_unet,
    blocks=(2, 3, 4, 6, 2, 2, 2, 2),
    widening="downsampling",
    norm_eps=1e-3,
    norm_momentum=0.01,
)
