"""Forward and backward of a network in one piece, for comparison with its layers' times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sparsepipe.profiling.activations import differentiable
from sparsepipe.profiling.clock import Clock

Slowed = Callable[[], AbstractContextManager[None]]
"""Makes the context of a piece of computation, which then takes longer."""


def step_seconds(
    layers: nn.Sequential, value: Any, *, device: torch.device, slowed: Slowed
) -> float:
    """Forward and backward of a network, in the mode that it is in, and its gradients let go.

    Args:
        layers: the network, on ``device``.
        value: its input, which nothing was computed from.
        device: where it runs.
        slowed: of a device that is made slower than it is.
    """
    clock = Clock(device)
    clock.synchronise()
    clock.mark()
    with slowed():
        roots = differentiable(layers(value))
    with slowed():
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    clock.mark()
    (seconds,) = clock.seconds()
    layers.zero_grad(set_to_none=True)
    return seconds
