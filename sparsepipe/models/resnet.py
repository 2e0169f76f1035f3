"""Sparse ResNet-18, -34 and -50, and the blocks that residual networks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from sparsepipe import sparse
from sparsepipe.models.chain import (
    ChainBlock,
    Head,
    SparseValue,
    check_sizes,
    joined,
    parted,
    require,
    scaled,
)

_BLOCKS: dict[int, tuple[int, ...]] = {
    # depth: residual blocks in each of the four stages
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
}
_STAGE_CHANNELS = (64, 128, 256, 512)
_EXPANSION = 4
Norm = Callable[[int], nn.Module]
"""Makes the normalisation of a number of channels."""


class ResidualBlock(nn.Module):
    """Computes ``relu(main(x) + shortcut(x))``; both must give the same sites and channels."""

    def __init__(self, main: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.main = main
        self.shortcut = shortcut
        self.relu = sparse.ReLU(inplace=True)

    def forward(self, x: sparse.SparseTensor) -> sparse.SparseTensor:
        out: sparse.SparseTensor = self.relu(sparse.add(self.main(x), self.shortcut(x)))
        return out


def residual_block(
    before: int,
    channels: int,
    *,
    stride: int = 1,
    bottleneck: bool = False,
    norm: Norm = sparse.BatchNorm,
    backend: sparse.Backend | None = None,
) -> ResidualBlock:
    """Builds a block from ``before`` channels to ``channels``, or 4 times as many with a
    ``bottleneck``: two convolutions of size 3, or one between two of size 1.
    """

    def conv(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
        # A strided window tiles the grid, so that both paths of a block have the same sites.
        size = stride if stride > 1 else size
        return [sparse.Conv3d(before, after, size, stride=stride, backend=backend), norm(after)]

    after = _EXPANSION * channels if bottleneck else channels
    main = [
        *conv(before, channels, *((1, 1) if bottleneck else (3, stride))),
        sparse.ReLU(inplace=True),
    ]
    if bottleneck:
        main += [*conv(channels, channels, 3, stride), sparse.ReLU(inplace=True)]
    main += conv(channels, after, 1 if bottleneck else 3)
    has_sum = stride == 1 and before == after
    shortcut = nn.Identity() if has_sum else nn.Sequential(*conv(before, after, 1, stride))
    return ResidualBlock(nn.Sequential(*main), shortcut)


class Up(nn.Module):
    """Takes features to the sites of the tensor kept last, normalises them, and joins that."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        norm: Norm = sparse.BatchNorm,
        backend: sparse.Backend | None = None,
    ) -> None:
        super().__init__()
        self.up = sparse.InverseConv3d(in_channels, out_channels, 2, stride=2, backend=backend)
        self.norm = norm(out_channels)
        self.relu = sparse.ReLU(inplace=True)

    def forward(self, input: SparseValue) -> SparseValue:
        """Returns ``out_channels`` and the kept tensor's channels, on its sites."""
        value, kept = parted(input)
        raised = self.relu(self.norm(self.up(value, kept[-1])))
        return joined(sparse.cat([raised, kept[-1]]), kept[:-1])


def chained(levels: Sequence[Sequence[nn.Module]]) -> list[nn.Module]:
    """Builds the entries of levels of resolution: the last of each but the last level is kept."""
    return [
        ChainBlock(
            module, keep="output" if place == len(level) - 1 and level is not levels[-1] else None
        )
        for level in levels
        for place, module in enumerate(level)
    ]


def sparse_resnet(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    head: Head = "classification",
    width: float = 1.0,
    dropout: float = 0.0,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Builds sparse ResNet-18, -34 or -50 with 15, 23 or 23 entries: a residual block is one entry.

    For segmentation, features return to the sites of the input as in a U-Net: at each level an
    inverse convolution, joined with the features of that level on the way down, and a residual
    block of the kind of that level. Without it, 16 x 16 x 16 voxels would share their logits.

    Args:
        depth: number of layers with weights: 18, 34, or 50 with bottleneck blocks.
        num_classes: outputs of the last layer.
        in_channels: channels of the input features; 1 if they are just the constant 1.
        head: ``classification`` (logits [B, K] of samples) or ``segmentation`` (logits [N, K] on
            the sites of the input).
        width: multiplies the channels of every hidden layer.
        dropout: probability of the dropout before the last layer.
        backend: backend of all layers; None: the default one.
    """
    require(depth in _BLOCKS, "depth", depth, f"one of {sorted(_BLOCKS)}")
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout, head=head)
    has_bottlenecks = depth >= 50
    channels = scaled(_STAGE_CHANNELS[0], width)
    stem = sparse.Conv3d(in_channels, channels, 3, backend=backend)
    levels: list[list[nn.Module]] = [[stem, sparse.BatchNorm(channels), sparse.ReLU()]]
    skips = []
    for stage, count in enumerate(_BLOCKS[depth]):
        inner = scaled(_STAGE_CHANNELS[stage], width)
        levels.append([] if stage else [sparse.MaxPool3d(2, backend=backend)])
        skips.append(channels)
        for number in range(count):
            stride = 2 if stage and not number else 1
            block = residual_block(
                channels, inner, stride=stride, bottleneck=has_bottlenecks, backend=backend
            )
            levels[-1].append(block)
            channels = _EXPANSION * inner if has_bottlenecks else inner
    if head == "classification":
        entries = [module for level in levels for module in level]
        entries.append(sparse.GlobalAvgPool(backend=backend))
    else:
        entries = chained(levels)
        for level, skip in reversed([*enumerate(skips)]):
            narrow = has_bottlenecks and level > 0  # the stem has no block on the way down
            inner = skip // _EXPANSION if narrow else skip
            block = residual_block(2 * skip, inner, bottleneck=narrow, backend=backend)
            entries += [Up(channels, skip, backend=backend), ChainBlock(block)]
            channels = skip
    return nn.Sequential(*entries, sparse.Dropout(dropout), sparse.Linear(channels, num_classes))


sparse_resnet18 = partial(sparse_resnet, 18)
sparse_resnet34 = partial(sparse_resnet, 34)
sparse_resnet50 = partial(sparse_resnet, 50)
