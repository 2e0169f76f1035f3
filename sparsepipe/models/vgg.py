"""VGG11, 13, 16 and 19 with batch normalization, sparse and dense.

Both forms share one layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.models.sizes import check_sizes, scaled

POOL = "pool"


_BLOCKS: dict[int, tuple[int, ...]] = {
    # depth: convolutions in each of the five blocks
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


_BLOCK_CHANNELS = (64, 128, 256, 512, 512)


_HEAD_CHANNELS = 4096


class LayerSet(Protocol):
    """The layer constructors in which the sparse and the dense form differ."""

    def conv(self, in_channels: int, out_channels: int) -> nn.Module: ...
    def norm(self, channels: int) -> nn.Module: ...
    def relu(self) -> nn.Module: ...
    def pool(self) -> nn.Module: ...
    def global_pool(self) -> nn.Module: ...
    def linear(self, in_features: int, out_features: int) -> nn.Module: ...
    def dropout(self, p: float) -> nn.Module: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VGGShape:
    """What fixes a VGG: its depth, its sizes and its dropout.

    Args:
        depth: 11, 13, 16 or 19 layers with weights.
        num_classes: outputs of the last layer.
        in_channels: channels of the input feature (the constant 1 has one).
        width: multiplies the channels of every hidden layer, the head included.
        dropout: probability of both dropout layers.

    Raises:
        ConfigError: a depth outside the family, a width that is not positive, or a
            dropout outside [0, 1).
    """

    depth: int
    num_classes: int
    in_channels: int = 1
    width: float = 1.0
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.depth not in _BLOCKS:
            raise ConfigError(
                f"there is no VGG of depth {self.depth}",
                remedy=f"choose one of {sorted(_BLOCKS)}",
            )
        check_sizes(
            self.num_classes,
            in_channels=self.in_channels,
            width=self.width,
            dropout=self.dropout,
        )

    def scaled(self, channels: int) -> int:
        """``channels`` times the width, at least 1."""
        return scaled(channels, self.width)

    def features(self) -> Iterator[int | str]:
        """Output channels of each convolution in order, and ``"pool"`` after each block."""
        for count, channels in zip(_BLOCKS[self.depth], _BLOCK_CHANNELS, strict=True):
            yield from [self.scaled(channels)] * count
            yield POOL


def build_vgg(shape: VGGShape, layers: LayerSet) -> nn.Sequential:
    """The network of ``shape`` as one ordered list of ``layers``."""
    entries: list[nn.Module] = []
    channels = shape.in_channels
    for entry in shape.features():
        if isinstance(entry, str):
            entries.append(layers.pool())
            continue
        entries += [layers.conv(channels, entry), layers.norm(entry), layers.relu()]
        channels = entry
    entries.append(layers.global_pool())
    hidden = shape.scaled(_HEAD_CHANNELS)
    for in_features in (channels, hidden):
        entries += [
            layers.linear(in_features, hidden),
            layers.relu(),
            layers.dropout(shape.dropout),
        ]
    entries.append(layers.linear(hidden, shape.num_classes))
    return nn.Sequential(*entries)


@dataclass(frozen=True, slots=True)
class SparseLayers:
    """The layer constructors of the sparse form; all layers share one backend."""

    backend: sparse.Backend | None = None

    def conv(self, in_channels: int, out_channels: int) -> nn.Module:
        return sparse.Conv3d(in_channels, out_channels, 3, backend=self.backend)

    def norm(self, channels: int) -> nn.Module:
        return sparse.BatchNorm(channels)

    def relu(self) -> nn.Module:
        return sparse.ReLU()

    def pool(self) -> nn.Module:
        return sparse.MaxPool3d(2, backend=self.backend)

    def global_pool(self) -> nn.Module:
        return sparse.GlobalMaxPool()

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return sparse.Linear(in_features, out_features)

    def dropout(self, p: float) -> nn.Module:
        return sparse.Dropout(p)


def sparse_vgg(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    width: float = 1.0,
    dropout: float = 0.5,
    backend: sparse.Backend | None = None,
) -> nn.Sequential:
    """Sparse VGG of ``depth`` 11, 13, 16 or 19: 37, 43, 52 or 61 layers.

    Arguments and errors as :class:`~sparsepipe.models.vgg.VGGShape`; ``backend``
    serves all layers (the native one by default).
    """
    shape = VGGShape(
        depth=depth,
        num_classes=num_classes,
        in_channels=in_channels,
        width=width,
        dropout=dropout,
    )
    return build_vgg(shape, SparseLayers(backend))


sparse_vgg11_bn = partial(sparse_vgg, 11)


sparse_vgg13_bn = partial(sparse_vgg, 13)


sparse_vgg16_bn = partial(sparse_vgg, 16)  # the paper's network


sparse_vgg19_bn = partial(sparse_vgg, 19)


class DenseGlobalMaxPool(nn.Module):
    """Maximum over the whole grid: [B, C, X, Y, Z] to [B, C]."""

    def forward(self, x_BCXYZ: Tensor) -> Tensor:
        return x_BCXYZ.amax(dim=(2, 3, 4))


class DenseLayers:
    """The layer constructors of the dense form."""

    def conv(self, in_channels: int, out_channels: int) -> nn.Module:
        # The norm that follows has the bias, as in the sparse form.
        return nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=False)

    def norm(self, channels: int) -> nn.Module:
        return nn.BatchNorm3d(channels)

    def relu(self) -> nn.Module:
        return nn.ReLU()

    def pool(self) -> nn.Module:
        # ceil_mode keeps the last row of odd grids (50 -> 25 -> 13), as the sparse
        # form does, whose coordinates are divided by 2 and rounded down.
        return nn.MaxPool3d(2, ceil_mode=True)

    def global_pool(self) -> nn.Module:
        return DenseGlobalMaxPool()

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features, out_features)

    def dropout(self, p: float) -> nn.Module:
        return nn.Dropout(p)


def dense_vgg(
    depth: int,
    num_classes: int,
    *,
    in_channels: int = 1,
    width: float = 1.0,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Dense VGG of ``depth`` 11, 13, 16 or 19: 37, 43, 52 or 61 layers.

    Arguments and errors as :class:`~sparsepipe.models.vgg.VGGShape`.
    """
    shape = VGGShape(
        depth=depth,
        num_classes=num_classes,
        in_channels=in_channels,
        width=width,
        dropout=dropout,
    )
    return build_vgg(shape, DenseLayers())


dense_vgg11_bn = partial(dense_vgg, 11)


dense_vgg13_bn = partial(dense_vgg, 13)


dense_vgg16_bn = partial(dense_vgg, 16)  # the paper's dense baseline


dense_vgg19_bn = partial(dense_vgg, 19)
