"""ConvNeXt: torchvision's parameters by name and number, its block, and stochastic depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe import models
from sparsepipe.models.convnext import CNBlock, StochasticDepth

PUBLISHED = {
    # parameters of 1,000 classes: torchvision's num_params; XL's, which it does not have, are the
    # 350 million of the paper's table 1
    "tiny": 28_589_128,
    "small": 50_223_688,
    "base": 88_591_464,
    "large": 197_767_336,
    "xl": 350_196_968,
}
CHANNELS = (96, 192, 384, 768)
TINY = {"width": 0.1, "blocks": (1, 1, 2, 1)}


def published_shapes(channels: tuple[int, ...], blocks: tuple[int, ...]) -> dict[str, list[int]]:
    """Names and shapes of the state dict that torchvision publishes, in order."""

    def affine(name: str, *shape: int) -> dict[str, list[int]]:
        return {f"{name}.weight": [*shape], f"{name}.bias": [shape[0]]}

    found = {**affine("features.0.0", channels[0], 3, 4, 4), **affine("features.0.1", channels[0])}
    for stage, (count, c) in enumerate(zip(blocks, channels, strict=True)):
        for number in range(count):
            name = f"features.{2 * stage + 1}.{number}"
            found |= {
                f"{name}.layer_scale": [c, 1, 1],
                **affine(f"{name}.block.0", c, 1, 7, 7),
                **affine(f"{name}.block.2", c),
                **affine(f"{name}.block.3", 4 * c, c),
                **affine(f"{name}.block.5", c, 4 * c),
            }
        if stage < 3:
            name = f"features.{2 * stage + 2}"
            found |= {**affine(f"{name}.0", c), **affine(f"{name}.1", channels[stage + 1], c, 2, 2)}
    return found | {
        **affine("classifier.0", channels[-1]),
        **affine("classifier.2", 1000, channels[-1]),
    }


@pytest.mark.parametrize("size", list(PUBLISHED))
def test_parameters_are_as_many_as_published(size: str) -> None:
    with torch.device("meta"):
        net = getattr(models, f"convnext_{size}")(1000)
    assert sum(p.numel() for p in net.parameters()) == PUBLISHED[size]


def test_names_and_shapes_are_torchvisions() -> None:
    with torch.device("meta"):
        net = models.convnext_small(1000)
    found = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    expected = published_shapes(CHANNELS, (3, 3, 27, 3))
    assert found == expected
    assert list(found) == list(expected)


def test_published_features_load_where_pixels_are_classified() -> None:
    with torch.device("meta"):
        net = models.convnext_tiny(21, head="segmentation")
        published = published_shapes(CHANNELS, (3, 3, 9, 3))
        state = {k: torch.empty(v) for k, v in published.items()}
    missing, unexpected = net.load_state_dict(state, strict=False, assign=True)
    assert sorted(missing) == ["classifier.1.bias", "classifier.1.weight"]
    assert sorted(unexpected) == ["classifier.2.bias", "classifier.2.weight"]


def test_a_block_is_the_papers() -> None:
    torch.manual_seed(0)
    block = CNBlock(6, layer_scale=0.5, stochastic_depth=0.0, checkpointing=False).double()
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)

    def linear(values: Tensor, layer: nn.Module) -> Tensor:
        return torch.einsum("oi,bihw->bohw", layer.weight, values) + layer.bias[:, None, None]

    depthwise, norm, wide, narrow = (block.block[n] for n in (0, 2, 3, 5))
    y = F.conv2d(x, depthwise.weight, depthwise.bias, padding=3, groups=6)
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
    y = linear(F.gelu(linear(y, wide)), narrow)
    torch.testing.assert_close(block(x), x + 0.5 * y, rtol=1e-12, atol=1e-12)


def test_layer_scale_begins_small_and_is_learnt() -> None:
    net = models.convnext_tiny(3, **TINY)
    scales = [p for name, p in net.named_parameters() if name.endswith("layer_scale")]
    assert len(scales) == 5
    assert all(bool((scale == 1e-6).all()) for scale in scales)
    net(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(scale.grad.abs().sum() > 0 for scale in scales)


def test_stochastic_depth_drops_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = StochasticDepth(0.25)
    x = torch.ones(4000, 2, 3, 3)
    found = drop(x).flatten(1)
    assert (found == found[:, :1]).all(), "all of a sample, or nothing"
    assert sorted(found.unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert (found[:, 0] == 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert drop.eval()(x) is x


def test_later_blocks_are_dropped_more_often() -> None:
    with torch.device("meta"):
        net = models.convnext_tiny(3, stochastic_depth=0.34)
    rates = [m.probability for m in net.modules() if isinstance(m, StochasticDepth)]
    assert rates == pytest.approx([0.02 * n for n in range(18)])


def test_a_pipeline_can_split_the_features() -> None:
    net = models.convnext_tiny(3, head="segmentation", **TINY).eval()
    assert type(net) is type(net.features) is nn.Sequential
    assert list(dict(net.named_children())) == ["features", "classifier", "resize"]
    value = x = torch.randn(1, 3, 40, 33)
    for entry in (*net.features, net.classifier, net.resize):
        value = entry(value)
    assert torch.equal(value, net(x))
