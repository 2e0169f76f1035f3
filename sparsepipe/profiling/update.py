"""Seconds of an optimizer's update of a network, and of a copy of its weights.

Where a pipeline stashes weights, it copies those that a minibatch in flight still uses before it
updates them. Clipping and hooks are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.profiling.timing import Clock, Slowed, median_and_spread

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Updates:
    """Measures updates and copies of all trained parameters, which are restored at the end.

    Args:
        layers: the network, on ``device``.
        make: makes the optimizer of its parameters.
        device: where it runs.
        slowed: makes the context of work on a device that is slower than this one.
    """

    def __init__(
        self, layers: nn.Sequential, make: MakeOptimizer, *, device: torch.device, slowed: Slowed
    ) -> None:
        self._trained = [p for p in layers.parameters() if p.requires_grad]
        self._optimizer = make(self._trained) if self._trained else None
        self._device, self._slowed = device, slowed
        self._before: list[Tensor] = []
        self._room: list[Tensor] = []  # for copies: memory that is used again, as a pipeline's is
        self._copies_s: list[float] = []
        self._updates_s: list[float] = []

    def take(self, *, counts: bool = True) -> None:
        """Makes a copy, then an update by gradients of zero.

        The first ones allocate memory for copies and the optimizer's state, and should not count.
        """
        if self._optimizer is None:
            return
        if not self._before:
            self._before = [p.detach().to("cpu", copy=True) for p in self._trained]
            self._room = [torch.empty_like(p.detach()) for p in self._trained]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        clock = Clock(self._device)
        clock.synchronise()
        clock.mark()
        with self._slowed():
            for room, parameter in zip(self._room, self._trained, strict=True):
                room.copy_(parameter.detach())
        clock.mark()
        with self._slowed():
            self._optimizer.step(lambda: 0.0)
        clock.mark()
        if counts:
            copy_s, update_s = clock.seconds()
            self._copies_s.append(copy_s)
            self._updates_s.append(update_s)
        for parameter in self._trained:
            parameter.grad = None

    def restore(self) -> None:
        """Restores the values of the parameters and drops their gradients."""
        with torch.no_grad():
            for parameter, before in zip(self._trained, self._before, strict=False):
                parameter.copy_(before)
                parameter.grad = None

    def shares_s(self, layers: nn.Sequential) -> dict[str, list[float]]:
        """Seconds of updates and of copies of each layer, by their names in a profile.

        Layers share them in proportion to their trained parameters.
        """
        sizes = own_bytes(layers, trained=True)
        whole = sum(sizes) or 1
        return {
            name: [(median_and_spread(times_s)[0] if times_s else 0.0) * s / whole for s in sizes]
            for name, times_s in (("update_s", self._updates_s), ("copy_s", self._copies_s))
        }


def own_bytes(layers: nn.Sequential, *, trained: bool = False) -> list[int]:
    """Bytes of the parameters of each layer; shared ones count once, for the first that has them.

    Args:
        layers: the network.
        trained: parameters that are frozen do not count.
    """
    seen: set[int] = set()
    sizes = []
    for layer in layers:
        own = {id(p): p for p in layer.parameters() if id(p) not in seen}
        sizes.append(sum(p.nbytes for p in own.values() if p.requires_grad or not trained))
        seen |= own.keys()
    return sizes
