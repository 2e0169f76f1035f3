"""The ResNet family against a dense network on masked grids, its sizes and its entries."""

from __future__ import annotations

import pytest
import torch

from sparsepipe import models
from tests.support.masked_networks import batch, check_equal

EDGES = ["Conv3d", "BatchNorm", "ReLU", "MaxPool3d", "GlobalAvgPool", "Dropout", "Linear"]


@pytest.mark.parametrize("head", ["classification", "segmentation"])
@pytest.mark.parametrize("depth", [18, 50])
def test_values_and_gradients_are_those_of_a_masked_dense_network(depth: int, head: str) -> None:
    torch.manual_seed(1)
    make = getattr(models, f"sparse_resnet{depth}")
    network = make(5, in_channels=3, width=0.07, head=head).double()
    check_equal(network, batch(), error=1e-10)


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
