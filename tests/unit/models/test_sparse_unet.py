"""Sparse U-Nets against dense networks on masked grids, their sizes, and stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from sparsepipe import models
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.sparse import NativeBackend, SparseTensor
from tests.support.masked_networks import batch, check_equal

SMALL = {"channels": (5, 6, 7, 4), "blocks": (1, 2, 1, 1), "stem_channels": 3, "in_channels": 3}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("minkunet14", {"width": 0.1}),
        ("spunet", {"width": 0.1}),
        ("sparse_unet", {**SMALL, "stem": (3, 3), "widening": "downsampling"}),
    ],
)
def test_values_and_gradients_are_those_of_a_masked_dense_network(
    name: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    network = getattr(models, name)(5, **{"in_channels": 3, **settings}).double()
    check_equal(network, batch(), error=1e-10)


@pytest.mark.parametrize(("name", "millions"), [("minkunet34", 37.9), ("spunet", 39.2)])
def test_they_are_as_large_as_published(name: str, millions: float) -> None:
    """For the 20 classes of ScanNet, and colours and normals."""
    with torch.device("meta"):
        network = getattr(models, name)(20, in_channels=6)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == millions


def test_stages_of_a_pipeline_hand_sparse_skips_on() -> None:
    """Cut anywhere, with caches that other ranks do not have, two stages equal the network."""
    torch.manual_seed(0)
    net = models.sparse_unet(3, **SMALL, backend=NativeBackend()).double()
    x = batch()
    net(x).feats.square().sum().backward()
    expected = [p.grad for p in net.parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    for cut in range(1, len(net)):
        net.zero_grad()
        stages = [
            StageLayers(net, net, first=a, last=b - 1) for a, b in ((0, cut), (cut, len(net)))
        ]
        first = stages[0].forward(x, minibatch=0)
        sent = pytree.tree_map(lambda each: each, first.output)
        assert all(
            each._cache is None
            for each in pytree.tree_leaves(sent, is_leaf=lambda e: isinstance(e, SparseTensor))
        )
        last = stages[1].forward(
            sent, minibatch=0, close=lambda run: (run().feats.square().sum(), None)
        )
        first.backward(last.backward(None))
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
