"""VGG-11, -13, -16 and -19 with batch normalisation; sparse and dense forms of one layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

from sparsepipe import sparse
from sparsepipe.models.chain import check_sizes, require, scaled

_BLOCKS: dict[int, tuple[int, ...]] = {
    # depth: convolutions in each of the five blocks
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
_BLOCK_CHANNELS = (64, 128, 256, 512, 512)
_HEAD_CHANNELS = 4096
_Layers = Mapping[str, Callable[..., nn.Module]]
"""Constructors, by kind, of the layers in which the sparse and the dense form differ."""


def sparse_vgg(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    width: float = 1.0,
    dropout: float = 0.5,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Builds a sparse VGG of ``depth`` 11, 13, 16 or 19, with 37, 43, 52 or 61 entries.

    Args:
        depth: number of layers with weights.
        num_classes: outputs of the last layer.
        in_channels: channels of the input features; 1 if they are just the constant 1.
        width: multiplies the channels of every hidden layer, including the head.
        dropout: probability of both dropout layers.
        backend: backend of all layers; None: the native one.
    """
    layers: _Layers = {
        "conv": partial(sparse.Conv3d, kernel_size=3, backend=backend),
        "norm": sparse.BatchNorm,
        "relu": sparse.ReLU,
        "pool": partial(sparse.MaxPool3d, 2, backend=backend),
        "global_pool": partial(sparse.GlobalMaxPool, backend=backend),
        "linear": sparse.Linear,
        "dropout": sparse.Dropout,
    }
    return _build(depth, num_classes, layers, in_channels=in_channels, width=width, dropout=dropout)


sparse_vgg11_bn = partial(sparse_vgg, 11)
sparse_vgg13_bn = partial(sparse_vgg, 13)
sparse_vgg16_bn = partial(sparse_vgg, 16)  # the paper's network
sparse_vgg19_bn = partial(sparse_vgg, 19)


class DenseGlobalMaxPool(nn.Module):
    """Takes the maximum over the whole grid, from [B, C, X, Y, Z] to [B, C]."""

    def forward(self, x_BCXYZ: Tensor) -> Tensor:
        return x_BCXYZ.amax(dim=(2, 3, 4))


def dense_vgg(
    depth: int, num_classes: int, *, in_channels: int = 1, width: float = 1.0, dropout: float = 0.5
) -> nn.Sequential:
    """Builds a VGG for grids [B, in_channels, X, Y, Z]; arguments as in :func:`sparse_vgg`."""
    layers: _Layers = {
        # Without a bias, as in the sparse form: the norm that follows has one.
        "conv": partial(nn.Conv3d, kernel_size=3, padding=1, bias=False),
        "norm": nn.BatchNorm3d,
        "relu": nn.ReLU,
        # ceil_mode keeps the last row of odd grids (50 -> 25 -> 13), as the sparse form does,
        # whose coordinates are divided by 2 and rounded down.
        "pool": partial(nn.MaxPool3d, 2, ceil_mode=True),
        "global_pool": DenseGlobalMaxPool,
        "linear": nn.Linear,
        "dropout": nn.Dropout,
    }
    return _build(depth, num_classes, layers, in_channels=in_channels, width=width, dropout=dropout)


dense_vgg11_bn = partial(dense_vgg, 11)
dense_vgg13_bn = partial(dense_vgg, 13)
dense_vgg16_bn = partial(dense_vgg, 16)  # the paper's dense baseline
dense_vgg19_bn = partial(dense_vgg, 19)


def _build(
    depth: int, num_classes: int, layers: _Layers, *, in_channels: int, width: float, dropout: float
) -> nn.Sequential:
    require(depth in _BLOCKS, "depth", depth, f"one of {sorted(_BLOCKS)}")
    check_sizes(num_classes, in_channels=in_channels, width=width, dropout=dropout)
    entries: list[nn.Module] = []
    channels = in_channels
    for count, block_channels in zip(_BLOCKS[depth], _BLOCK_CHANNELS, strict=True):
        out_channels = scaled(block_channels, width)
        for _ in range(count):
            conv = layers["conv"](channels, out_channels)
            entries += [conv, layers["norm"](out_channels), layers["relu"]()]
            channels = out_channels
        entries.append(layers["pool"]())
    entries.append(layers["global_pool"]())
    hidden = scaled(_HEAD_CHANNELS, width)
    for in_features in (channels, hidden):
        linear = layers["linear"](in_features, hidden)
        entries += [linear, layers["relu"](), layers["dropout"](dropout)]
    entries.append(layers["linear"](hidden, num_classes))
    return nn.Sequential(*entries)
