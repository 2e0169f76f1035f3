"""How long an optimizer takes to apply the gradients of a network.

What a pipeline does beside that counts nowhere: where weights are stashed, stages before the last
copy those that a minibatch in flight still uses before each update, and clipping and hooks run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.profiling.clock import Clock, median_and_spread
from sparsepipe.profiling.step import Slowed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Updates:
    """Updates of all parameters that are trained, which are put back at the end.

    Args:
        layers: the network, on ``device``.
        make: called with its parameters.
        device: where it runs.
        slowed: of a device that is made slower than it is.
    """

    def __init__(
        self, layers: nn.Sequential, make: MakeOptimizer, *, device: torch.device, slowed: Slowed
    ) -> None:
        self._trained = [p for p in layers.parameters() if p.requires_grad]
        self._optimizer = make(self._trained) if self._trained else None
        self._device, self._slowed = device, slowed
        self._before: list[Tensor] = []
        self._times_s: list[float] = []

    def take(self, *, counts: bool = True) -> None:
        """Makes an update by gradients of zero.

        Args:
            counts: whether it is one of those that are measured; the first one makes the
                optimizer's state, and should not be.
        """
        if self._optimizer is None:
            return
        if not self._before:
            self._before = [p.detach().to("cpu", copy=True) for p in self._trained]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        clock = Clock(self._device)
        clock.synchronise()
        clock.mark()
        with self._slowed():
            self._optimizer.step(lambda: 0.0)
        clock.mark()
        if counts:
            self._times_s += clock.seconds()
        for parameter in self._trained:
            parameter.grad = None

    def put_back(self) -> None:
        """Gives the parameters the values that they had, and no gradients."""
        with torch.no_grad():
            for parameter, before in zip(self._trained, self._before, strict=False):
                parameter.copy_(before)
                parameter.grad = None

    def shares_s(self, layers: nn.Sequential) -> list[float]:
        """Of each layer, in proportion to its trained parameters; those that come again once.

        Args:
            layers: the same network.
        """
        seconds = median_and_spread(self._times_s)[0] if self._times_s else 0.0
        seen: set[int] = set()
        sizes = []
        for layer in layers:
            own = {id(p): p for p in layer.parameters() if p.requires_grad and id(p) not in seen}
            sizes.append(sum(p.nbytes for p in own.values()))
            seen |= own.keys()
        return [seconds * size / (sum(sizes) or 1) for size in sizes]
