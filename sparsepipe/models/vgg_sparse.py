"""Sparse VGG11, 13, 16 and 19 with batch normalization.

They map a ``SparseTensor`` (features [N, in_channels]) to logits [B, num_classes].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from sparsepipe import sparse
from sparsepipe.models.vgg_layout import VGGShape, build_vgg


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

    Arguments and errors as :class:`~sparsepipe.models.vgg_layout.VGGShape`; ``backend``
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
