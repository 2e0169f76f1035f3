"""ConvNeXt for images, with torchvision's parameter names, so that its weights can be loaded.

Source: Liu, Mao, Wu, Feichtenhofer, Darrell and Xie, "A ConvNet for the 2020s" (CVPR 2022),
section 2, with LayerScale (Touvron et al., "Going Deeper with Image Transformers") and stochastic
depth (Huang et al., "Deep Networks with Stochastic Depth"). Initialised as in torchvision.

    net = convnext_tiny(1000)
    net.load_state_dict(torch.load("convnext_tiny-983f1562.pth"))
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sparsepipe.models.chain import (
    ENTRY_KEEP,
    ChainBlock,
    Head,
    Resized,
    check_sizes,
    recomputed,
    require,
    scaled,
)

_NORM_EPS = 1e-6
_EXPANSION = 4


class Permute(nn.Module):
    """Returns a view of a tensor whose dimensions are in the given ``order``."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = tuple(order)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels at each position of [B, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        channels_last = super().forward(input.permute(0, 2, 3, 1))
        return channels_last.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    """Drops a residual branch for random samples in training; torchvision's mode "row"."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Returns zeros or ``x / (1 - probability)`` for each sample; in evaluation, ``x``."""
        if not self.training or self.probability == 0:
            return x
        survival = 1 - self.probability
        shape = [x.shape[0], *[1] * (x.dim() - 1)]
        kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(survival)
        return x * kept.div_(survival)


class CNBlock(nn.Module):
    """Computes ``x + stochastic_depth(scale * mlp(norm(depthwise(x))))``; figure 4 of the paper."""

    def __init__(
        self, channels: int, *, layer_scale: float, stochastic_depth: float, checkpointing: bool
    ) -> None:
        super().__init__()
        hidden = _EXPANSION * channels
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute((0, 2, 3, 1)),
            nn.LayerNorm(channels, eps=_NORM_EPS),
            nn.Linear(channels, hidden),
            nn.GELU(),
            nn.Linear(hidden, channels),
            Permute((0, 3, 1, 2)),
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), layer_scale))
        self.stochastic_depth = StochasticDepth(stochastic_depth)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self, self._sum, x) if self.checkpointing else self._sum(x)

    def _sum(self, x: Tensor) -> Tensor:
        branch: Tensor = self.stochastic_depth(self.layer_scale * self.block(x))
        return x + branch


def convnext(
    num_classes: int,
    *,
    channels: Sequence[int],
    blocks: Sequence[int],
    in_channels: int = 3,
    head: Head = "classification",
    width: float = 1.0,
    layer_scale: float = 1e-6,
    stochastic_depth: float = 0.0,
    checkpointing: bool = False,
) -> nn.Sequential:
    """ConvNeXt from [B, in_channels, H, W] to logits [B, num_classes] or [B, num_classes, H, W].

    The entries are ``features`` (a chain of the stem, the stages and the layers between them),
    ``avgpool`` and ``classifier``; a pipeline splits the chain
    (``parallel.strategy.layers=layers.features``). For segmentation, ``classifier`` maps each
    position, without ``avgpool``, and ``resize`` interpolates its logits to the size of the image.
    With four stages, height and width must be at least 32.

    ``channels`` and ``blocks`` list the channels and the number of blocks of each stage; published
    weights have 3 input channels and a ``width`` of 1, which multiplies all channels.
    ``layer_scale`` is LayerScale's initial value. ``stochastic_depth`` is the probability that a
    sample skips the last block in training; it rises linearly from 0 at the first block. Other
    arguments are those of :func:`sparsepipe.models.cnn.cnn_nd`.
    """
    check_sizes(num_classes, in_channels=in_channels, width=width, head=head)
    valid = 0 <= stochastic_depth < 1
    require(valid, "stochastic_depth", stochastic_depth, "a probability in [0, 1)")
    valid = bool(blocks) and len(blocks) == len(channels) and min(blocks) >= 1
    require(valid, "blocks", blocks, f"1 or more blocks for each of {len(channels)} stages")
    norm = partial(LayerNorm2d, eps=_NORM_EPS)
    sizes = [scaled(each, width) for each in channels]
    stem = nn.Conv2d(in_channels, sizes[0], 4, stride=4)
    least = 2 ** (len(sizes) + 1)
    features: list[nn.Module] = [
        ChainBlock(stem, norm(sizes[0]), keep=ENTRY_KEEP[head], least=least)
    ]
    last = max(sum(blocks) - 1, 1)
    depths = iter([stochastic_depth * number / last for number in range(sum(blocks))])
    for stage, (count, size) in enumerate(zip(blocks, sizes, strict=True)):
        if stage:
            before = sizes[stage - 1]
            features.append(ChainBlock(norm(before), nn.Conv2d(before, size, 2, stride=2)))
        make = partial(CNBlock, size, layer_scale=layer_scale, checkpointing=checkpointing)
        features.append(ChainBlock(*(make(stochastic_depth=next(depths)) for _ in range(count))))
    size = sizes[-1]
    if head == "segmentation":
        ends: dict[str, nn.Module] = {
            "classifier": ChainBlock(norm(size), nn.Conv2d(size, num_classes, 1)),
            "resize": Resized(2),
        }
    else:
        linear = nn.Linear(size, num_classes)
        ends = {
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "classifier": nn.Sequential(norm(size), nn.Flatten(), linear),
        }
    net = nn.Sequential(OrderedDict({"features": nn.Sequential(*features), **ends}))
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net


_CHANNELS = (96, 192, 384, 768)
_deep = partial(convnext, blocks=(3, 3, 27, 3), stochastic_depth=0.5)
convnext_tiny = partial(convnext, channels=_CHANNELS, blocks=(3, 3, 9, 3), stochastic_depth=0.1)
convnext_small = partial(_deep, channels=_CHANNELS, stochastic_depth=0.4)
convnext_base = partial(_deep, channels=(128, 256, 512, 1024))
convnext_large = partial(_deep, channels=(192, 384, 768, 1536))
convnext_xl = partial(_deep, channels=(256, 512, 1024, 2048))
