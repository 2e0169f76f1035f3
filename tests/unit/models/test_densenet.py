"""DenseNet on volumes."""

from __future__ import annotations

import torch
from torch import nn

from sparsepipe import models
from sparsepipe.models.densenet import DenseLayer


def test_its_parameters_are_those_of_densenet_121_in_three_dimensions() -> None:
    """As MONAI's DenseNet121 of three dimensions has them, for one channel and two classes."""
    with torch.device("meta"):
        net = models.densenet3d(2)
    assert sum(p.numel() for p in net.parameters()) == 11_244_674
    assert sum(isinstance(m, nn.Conv3d) for m in net.modules()) + 1 == 121


def test_a_layer_puts_new_features_beside_its_input() -> None:
    x = torch.randn(2, 6, 3, 4, 5)
    layer = DenseLayer(6, 4, checkpointing=False)
    found = layer(x)
    assert found.shape == (2, 10, 3, 4, 5)
    assert torch.equal(found[:, :6], x)
    value, kept = layer((x, x[:, :1]))
    assert torch.equal(value, layer(x))
    assert kept.shape == (2, 1, 3, 4, 5)


def test_each_dense_layer_is_an_entry() -> None:
    with torch.device("meta"):
        net = models.densenet3d(2)
    assert sum(isinstance(entry, DenseLayer) for entry in net) == 6 + 12 + 24 + 16
