"""Dense VGG11, 13, 16 and 19 with batch normalization: the paper's baseline.

They map dense occupancy [B, in_channels, X, Y, Z] to logits [B, num_classes].
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from sparsepipe.models.vgg_layout import VGGShape, build_vgg


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

    Arguments and errors as :class:`~sparsepipe.models.vgg_layout.VGGShape`.
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
