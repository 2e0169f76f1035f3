"""The ResNet family against a dense network on masked grids, its sizes and its entries.

Shape suffixes: B samples, C channels, X Y Z the grid.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe import models
from sparsepipe.models.resnet import ResidualBlock
from sparsepipe.sparse import SparseTensor

GRID = 13  # odd, even and odd again on the way down: 13, 7, 4, 2, 1
EDGES = ["Conv3d", "BatchNorm", "ReLU", "MaxPool3d", "GlobalAvgPool", "Dropout", "Linear"]


class Dense:
    """The network's own parameters on whole grids: what is not a site is zero at every layer."""

    def __init__(self, x: SparseTensor) -> None:
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
        self.value = F.linear(self.value, linear.weight, linear.bias)

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


@pytest.mark.parametrize("depth", [18, 50])
def test_values_and_gradients_are_those_of_a_masked_dense_network(depth: int) -> None:
    torch.manual_seed(1)
    make = getattr(models, f"sparse_resnet{depth}")
    network = make(5, in_channels=3, width=0.07).double()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    x = batch()
    ours = network(x)
    theirs = Dense(x).run(network).value
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    assert theirs.std() > 1e-3  # no dead network: the comparison says something
    weight = torch.randn_like(ours)
    parameters = dict(network.named_parameters())
    found, expected = (
        torch.autograd.grad((logits * weight).sum(), list(parameters.values()))
        for logits in (ours, theirs)
    )
    for name, one, other in zip(parameters, found, expected, strict=True):
        scale = float(other.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7 * scale, msg=name)


@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (34, 16), (50, 16)])
def test_a_residual_block_is_one_entry(depth: int, blocks: int) -> None:
    network = getattr(models, f"sparse_resnet{depth}")(10, width=0.05)
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == EDGES[:4] + ["ResidualBlock"] * blocks + EDGES[4:]


@pytest.mark.parametrize(
    ("depth", "parameters"), [(18, 31_095_912), (34, 61_405_544), (50, 58_947_176)]
)
def test_parameters_are_as_many_as_counted_by_hand(depth: int, parameters: int) -> None:
    """Of kernels of 3, those of strides of 2 of 2, with their norms, and 40 classes."""
    with torch.device("meta"):
        network = getattr(models, f"sparse_resnet{depth}")(40)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_both_paths_of_a_block_derive_coordinates_once() -> None:
    network = models.sparse_resnet18(4, in_channels=3, width=0.05).double()
    x = batch()
    for layer in network[:6]:
        x = layer(x)
    block, sides = network[6], []
    block.main.register_forward_hook(lambda *given: sides.append(given[2]))
    block.shortcut.register_forward_hook(lambda *given: sides.append(given[2]))
    out = block(x)
    assert sides[0].coords is sides[1].coords is out.coords
    halved = torch.div(x.coords, torch.tensor([1, 2, 2, 2]), rounding_mode="floor")
    assert torch.equal(torch.unique(out.coords, dim=0), torch.unique(halved, dim=0).int())
