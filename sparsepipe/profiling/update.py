"""How long an optimizer takes to apply the gradients of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from sparsepipe.profiling.clock import Clock, median_and_spread
from sparsepipe.profiling.step import Slowed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_WARMUP, _MEASURED = 2, 7
"""Its state is made in the first update."""


def update_seconds(
    layers: nn.Sequential, make: MakeOptimizer, *, device: torch.device, slowed: Slowed
) -> float:
    """An update of all parameters, median; these and their gradients are put back afterwards.

    Args:
        layers: the network, on ``device``.
        make: called with its parameters.
        device: where it runs.
        slowed: of a device that is made slower than it is.
    """
    parameters = list(layers.parameters())
    if not parameters:
        return 0.0
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]
    optimizer, clock = make(parameters), Clock(device)
    times_s = []
    try:
        for _ in range(_WARMUP + _MEASURED):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            clock.synchronise()
            clock.mark()
            with slowed():
                optimizer.step()
            clock.mark()
            times_s += clock.seconds()
    finally:
        for parameter, was in before:
            parameter.grad = None
            with torch.no_grad():
                parameter.copy_(was)
    return median_and_spread(times_s[_WARMUP:])[0]
