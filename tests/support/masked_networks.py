"""Sparse networks on whole grids: what is not a site is zero at every layer.

Shape suffixes: B samples, C channels, X Y Z the grid, P parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.models.resnet import ResidualBlock, Up
from sparsepipe.sparse import SparseTensor

GRID = 13  # odd, even and odd again on the way down: 13, 7, 4, 2, 1


class Dense:
    """The network's own parameters on whole grids: what is not a site is zero at every layer."""

    def __init__(self, x: SparseTensor) -> None:
        self.kept: list[Dense] = []
        self.value = x.dense()
        self.mask = x.replace_feats(torch.ones(len(x), 1, dtype=x.dtype)).dense()

    def copy(self) -> Dense:
        other = object.__new__(Dense)
        other.value, other.mask = self.value, self.mask
        return other

    def run(self, layer: nn.Module) -> Dense:
        if isinstance(layer, nn.Sequential):
            for child in layer:
                self.run(child)
            if getattr(layer, "keep", None):
                self.kept.append(self.copy())
        elif isinstance(layer, Up):
            skip = self.kept.pop()
            weight = layer.up.kernel.unflatten(0, (2, 2, 2)).permute(3, 4, 2, 1, 0)
            raised = F.conv_transpose3d(self.value, weight, stride=2)
            x, y, z = skip.mask.shape[2:]
            self.mask, self.value = skip.mask, raised[..., :x, :y, :z] * skip.mask
            for child in (layer.norm, layer.relu):
                self.run(child)
            self.value = torch.cat([self.value, skip.value], 1)
        elif isinstance(layer, ResidualBlock):
            side = self.copy().run(layer.shortcut)
            self.run(layer.main)
            assert torch.equal(side.mask, self.mask)
            self.value = (self.value + side.value).relu()
        else:
            getattr(self, type(layer).__name__.lower())(layer)
        return self

    def identity(self, _: nn.Module) -> None: ...

    def relu(self, _: nn.Module) -> None:
        self.value = self.value.relu()

    def dropout(self, _: nn.Module) -> None: ...

    def conv3d(self, conv: nn.Module) -> None:
        size, stride = conv.spec.size[0], conv.spec.stride[0]
        # [K, C, D], x fastest, to [D, C, X, Y, Z]
        weight = conv.kernel.unflatten(0, (size,) * 3).permute(4, 3, 2, 1, 0)
        if stride > 1:
            self._coarser()
            self.value = F.conv3d(_padded(self.value), weight, stride=stride)
        else:
            self.value = F.conv3d(self.value, weight, padding=size // 2)
        self.value = self.value * self.mask

    def batchnorm(self, norm: nn.BatchNorm1d) -> None:
        dims, count = (0, 2, 3, 4), self.mask.sum()
        mean_C = self.value.sum(dims) / count
        centred = (self.value - mean_C.view(-1, 1, 1, 1)) * self.mask
        scale_C = norm.weight / (centred.square().sum(dims) / count + norm.eps).sqrt()
        scaled = centred * scale_C.view(-1, 1, 1, 1) + norm.bias.view(-1, 1, 1, 1)
        self.value = scaled * self.mask

    def maxpool3d(self, _: nn.Module) -> None:
        hidden = self.value.masked_fill(self.mask == 0, -torch.inf)
        pooled = F.max_pool3d(hidden, 2, ceil_mode=True)
        self._coarser()
        self.value = pooled.masked_fill(self.mask == 0, 0)

    def globalavgpool(self, _: nn.Module) -> None:
        self.value = self.value.sum((2, 3, 4)) / self.mask.sum((2, 3, 4))

    def linear(self, linear: nn.Linear) -> None:
        if self.value.dim() == 2:
            self.value = F.linear(self.value, linear.weight, linear.bias)
        else:
            weight = linear.weight[..., None, None, None]
            self.value = F.conv3d(self.value, weight, linear.bias) * self.mask

    def _coarser(self) -> None:
        """Windows of 2 tile the grid: a site wherever one of the window's eight is."""
        self.mask = F.max_pool3d(self.mask, 2, ceil_mode=True)


def _padded(value_BCXYZ: Tensor) -> Tensor:
    return F.pad(value_BCXYZ, (0, value_BCXYZ.shape[-1] % 2) * 3)


def batch(grid: int = GRID, share: float = 0.15) -> SparseTensor:
    """Two samples with few sites, each sample with some, and three channels."""
    draw = torch.Generator().manual_seed(3)
    occupied = torch.rand(2, grid, grid, grid, generator=draw) < share
    coords = occupied.nonzero().int()
    feats = torch.randn(len(coords), 3, dtype=torch.float64, generator=draw)
    return SparseTensor(feats, coords, spatial_shape=(grid,) * 3, batch_size=2)


def random_norms(network: nn.Module) -> nn.Module:
    """The network with weights of its norms that are not 1 and 0."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    return network


def check_equal(network: nn.Sequential, x: SparseTensor, *, error: float) -> None:
    """Values and gradients of parameters and features are those of the masked dense network, to a
    share of the largest.
    """
    random_norms(network)
    x = x.replace_feats(x.feats.requires_grad_())
    ours, theirs = network(x), Dense(x).run(network).value
    if isinstance(ours, SparseTensor):
        b, i, j, k = x.coords.long().unbind(1)
        ours, theirs = ours.feats, theirs[b, :, i, j, k]
    assert theirs.std() > 1e-3  # no dead network: the comparison says something
    weight = torch.randn_like(ours)
    wanted = {"features": x.feats, **dict(network.named_parameters())}
    found, expected = (
        torch.autograd.grad((logits * weight).sum(), list(wanted.values()))
        for logits in (ours, theirs)
    )
    pairs = zip(["logits", *wanted], [ours, *found], [theirs, *expected], strict=True)
    for name, one, other in pairs:
        scale = float(other.detach().abs().max())
        assert scale > 0, name
        assert float((one - other).abs().max()) <= error * scale, name
