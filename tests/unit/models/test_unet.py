"""The 3D U-Net: the paper's size, skips, and volumes of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe import models
from sparsepipe.errors import ConfigError
from sparsepipe.runtime.stage import StageLayers


def test_its_parameters_are_the_papers_19069955() -> None:
    """Which counts of a batch norm its shift only: the bias of the convolution before it."""
    with torch.device("meta"):
        net = models.unet3d(3, in_channels=3)
    scales = sum(m.weight.numel() for m in net.modules() if isinstance(m, nn.BatchNorm3d))
    assert sum(p.numel() for p in net.parameters()) - scales == 19_069_955


def test_skips_carry_what_the_bottom_has_lost() -> None:
    torch.manual_seed(0)
    net = models.unet3d(2, width=0.1, levels=3).eval()
    x = torch.randn(1, 1, 8, 8, 8, requires_grad=True)
    bottom = next(e for e, entry in enumerate(net) if type(entry).__name__ == "Up") - 1
    value = net[:bottom](x)
    nothing = torch.zeros_like(value[0])
    net[bottom:]((nothing, *value[1:]))[0, 0, 4, 4, 4].backward()
    seen = x.grad.nonzero()[:, 2:]
    assert len(seen) > 1
    assert (seen - 4).abs().max() < 8


def test_deep_supervision_adds_logits_of_lower_resolutions_in_training() -> None:
    """In evaluation the network is that without, with the same weights."""
    torch.manual_seed(0)
    made = {"width": 0.1, "levels": 4}
    net = models.unet3d(3, **made, deep_supervision=True).double()
    plain = models.unet3d(3, **made).double()
    x = torch.randn(2, 1, 8, 9, 11, dtype=torch.float64)
    outputs = net(x)
    assert [each.shape for each in outputs] == [(2, 3, 8, 9, 11)] * 3
    scores = [entry.score for entry in net if getattr(entry, "score", None) is not None]
    assert len(scores) == 2
    for output, score in zip(outputs[1:], reversed(scores), strict=True):  # the finer first
        sums = [
            torch.autograd.grad(each.sum(), score.bias, retain_graph=True, allow_unused=True)[0]
            for each in outputs
        ]
        assert [each is output for each in outputs] == [each is not None for each in sums]
    values = [v for name, v in net.state_dict().items() if ".score." not in name]
    plain.load_state_dict(dict(zip(plain.state_dict(), values, strict=True)))
    torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="deep_supervision"):
        models.unet3d(3, head="classification", deep_supervision=True)


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointing"])
def test_stages_of_a_pipeline_hand_skips_on(again: bool, supervised: bool) -> None:
    """Cut anywhere, two stages equal the whole network."""
    torch.manual_seed(0)
    made = {"width": 0.1, "levels": 3, "deep_supervision": supervised}
    net = models.unet3d(3, **made, checkpointing=again).double()
    x = torch.randn(2, 1, 6, 5, 7, dtype=torch.float64)

    def loss(outputs: Any) -> torch.Tensor:
        return torch.stack([*outputs] if supervised else [outputs]).square().sum()

    loss(net(x)).backward()
    expected = [p.grad for p in net.parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    for cut in range(1, len(net)):
        net.zero_grad()
        stages = [
            StageLayers(net, net, first=a, last=b - 1) for a, b in ((0, cut), (cut, len(net)))
        ]
        first = stages[0].forward(x, minibatch=0)
        close = lambda run: (loss(run()), None)  # noqa: E731
        last = stages[1].forward(first.output, minibatch=0, close=close)
        first.backward(last.backward(None))
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
