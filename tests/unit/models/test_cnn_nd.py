"""Plain CNNs on signals, images and volumes."""

from __future__ import annotations

import torch
from torch import nn

from sparsepipe import models


def test_levels_double_channels_and_halve_the_resolution() -> None:
    net = models.cnn2d(10, levels=4, convolutions=3, kernel_size=5)
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [32] * 3 + [64] * 3 + [128] * 3 + [256] * 3
    assert {m.kernel_size for m in convolutions} == {(5, 5)}
    assert sum(isinstance(m, nn.MaxPool2d) for m in net.modules()) == 3
    features = nn.Sequential(*list(net)[:-4])
    assert features(torch.zeros(1, 1, 32, 48)).shape == (1, 256, 4, 6)


def test_it_is_a_chain_of_one_entry_for_each_block() -> None:
    net = models.cnn3d(4, head="segmentation")
    assert len(net) == 3 * 2 + 2 + 2
    value = x = torch.randn(1, 1, 5, 6, 7)
    net.eval()
    for entry in net:
        value = entry(value)
    assert torch.equal(value, net(x))
