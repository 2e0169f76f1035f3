"""FCN-8s: its size, its skips, and its way back to the size of the image."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sparsepipe import models
from sparsepipe.models.fcn import UpScore


def test_its_parameters_are_those_of_vgg16_and_the_scores() -> None:
    with torch.device("meta"):
        net = models.fcn2d(21, batch_norm=False)
    vgg16, last = 138_357_544, 4096 * 1000 + 1000
    scores = sum(channels * 21 + 21 for channels in (256, 512, 4096))
    interpolations = 21 * 21 * (2 * 4**2 + 16**2)
    assert sum(p.numel() for p in net.parameters()) == vgg16 - last + scores + interpolations


def test_scores_of_skips_begin_at_zero_and_learn() -> None:
    torch.manual_seed(0)
    net = models.fcn2d(3, width=0.05, dropout=0.0)
    ups = [entry for entry in net if isinstance(entry, UpScore)]
    assert [up.score is None for up in ups] == [False, False, True]
    x, label = torch.randn(2, 3, 40, 40), torch.randint(3, (2, 40, 40))
    for step in range(2):
        assert all((p == 0).all() == (step == 0) for up in ups[:2] for p in up.score.parameters())
        F.cross_entropy(net(x), label).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.1 * parameter.grad)
    assert all(up.score.weight.grad.abs().sum() > 0 for up in ups[:2])


@pytest.mark.parametrize("factor", [2, 8])
def test_transposed_convolutions_begin_as_bilinear_interpolation(factor: int) -> None:
    x = torch.randn(1, 3, 6, 7)
    up = UpScore(3, factor=factor)
    larger = torch.zeros(1, 1, 6 * factor, 7 * factor)
    found = up((x, larger))
    expected = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    inside = (..., slice(factor, -factor), slice(factor, -factor))
    torch.testing.assert_close(found[inside], expected[inside])
