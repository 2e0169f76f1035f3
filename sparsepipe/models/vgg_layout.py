"""The VGG family's layout, shared by its sparse and its dense form.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale
Image Recognition", Table 1 (columns A, B, D, E); in three dimensions, with batch
normalization and a global max-pool before the head, as Zhai et al., "SparsePipe",
train it. VGG16 then has 52 layers: 13 x (convolution, norm, ReLU), 5 max-pools,
the global max-pool, and linear, ReLU, dropout, linear, ReLU, dropout, linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn

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
