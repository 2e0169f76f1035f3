"""The networks and samples of the benchmark of spatial parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sparsepipe.models import cnn2d, convnext_tiny, unet3d

CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A network, and samples of noise: what it learns takes no other time.

    Args:
        name: of the network.
        width: multiplies its channels.
        channels: of a sample.
        size: of it.
        batch_size: B.
    """

    name: str
    width: float
    channels: int
    size: tuple[int, ...]
    batch_size: int = 1

    def __str__(self) -> str:
        size = " x ".join(map(str, self.size))
        return f"{self.name} of width {self.width:g} at {size}, {self.batch_size} a minibatch"

    @property
    def grid(self) -> tuple[int, ...]:
        """Of two ranks: the last dimension is cut."""
        return (*[1] * (len(self.size) - 1), 2)

    def layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        net = _MODELS[self.name][0](CLASSES, in_channels=self.channels, width=self.width)
        chain = getattr(net, "features", None)  # the stages of a ConvNeXt, where it can be split
        return net if chain is None else nn.Sequential(*chain, *list(net)[1:])

    def input(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.rand(self.batch_size, self.channels, *self.size, generator=generator)


_Model = tuple[Callable[..., nn.Sequential], int, tuple[int, ...], tuple[int, ...]]
_MODELS: dict[str, _Model] = {
    "cnn2d": (cnn2d, 1, (1024, 1024), (64, 96)),
    "unet3d": (partial(unet3d, head="classification"), 1, (96, 96, 96), (16, 16, 32)),
    "convnext_tiny": (partial(convnext_tiny, stochastic_depth=0.0), 3, (512, 1024), (64, 128)),
}
"""Of each name: the network, the channels and the size of a sample, and a small size."""

NAMES = tuple(_MODELS)


def workload(name: str, *, quick: bool, width: float) -> Sample:
    """A network with its sample.

    Args:
        name: one of :data:`NAMES`.
        quick: a small sample.
        width: multiplies the channels.
    """
    _, channels, size, small = _MODELS[name]
    return Sample(
        name=name,
        width=0.25 if quick else width,
        channels=channels,
        size=small if quick else size,
    )
