"""The CNN of 5x5 convolutions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sparsepipe.data.images.drawn_digits import draw
from sparsepipe.models import cnn_5x5
from sparsepipe.schedule.plan import balanced


def test_layers_and_shapes() -> None:
    net = cnn_5x5(10, convolutions=6, width=0.25)
    assert len(net) == 2 * 6 + 5
    assert net(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    kernels = {layer.kernel_size for layer in net if isinstance(layer, nn.Conv2d)}
    assert kernels == {(5, 5)}
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net)
    assert not any(getattr(layer, "inplace", False) for layer in net), "its input may be kept"


def test_only_later_convolutions_begin_near_the_identity() -> None:
    """Also where the first has as many channels on both sides."""
    torch.manual_seed(0)
    kernels = [layer.weight.detach() for layer in cnn_5x5(10, in_channels=8, width=0.25)[:6:3]]
    gaps = [float((each - nn.init.dirac_(torch.empty_like(each))).norm()) for each in kernels]
    assert gaps[0] > 3 > 1 > gaps[1]


def test_by_default_eight_stages_can_have_nearly_equal_shares() -> None:
    """By multiplications; what layers take is measured (task=profile)."""
    net, x, costs = cnn_5x5(10), torch.zeros(1, 1, 28, 28), []
    with torch.no_grad():
        for layer in net:
            x = layer(x)
            weights = getattr(layer, "weight", None)
            places = x.shape[2] * x.shape[3] if isinstance(layer, nn.Conv2d) else 1
            costs.append(0.0 if weights is None else float(weights.numel() * places))
    for stages in (2, 4, 8):
        bounds = [0, *balanced(costs, [1] * stages), len(costs)]
        shares = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        assert max(shares) / (sum(shares) / stages) < 1.1, (stages, shares)


def test_it_learns_digits_without_norms() -> None:
    """As many layers as by default, narrow: what they hand on differs from image to image."""
    torch.manual_seed(0)
    net, labels = cnn_5x5(10, width=0.25), np.arange(20) % 10
    images = draw(labels, np.random.default_rng(0), side=28)
    x, label = torch.from_numpy(images)[:, None].float() / 255, torch.from_numpy(labels)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(net(x), label)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert min(losses) < 0.7 * losses[0]
