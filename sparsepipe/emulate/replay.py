"""Layers that compute nothing and take as long as a profile says.

What they send and average has its real size, so that it takes its real time; it is all zeros,
in memory that they share, so that it costs no processor time. n: floats of an activation,
p: floats of a layer's parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.emulate.pace import Pace
from sparsepipe.profiling import LayerProfile

FLOAT_BYTES = 4


class Zeros:
    """Tensors of zeros that share one memory; nobody may write to them."""

    def __init__(self) -> None:
        self._memory = torch.zeros(0)

    def of(self, count: int) -> Tensor:
        """float32 [count]."""
        if self._memory.numel() < count:
            self._memory = torch.zeros(count)
        # No view, whose base autograd would look after.
        return torch.empty(0).set_(self._memory.untyped_storage(), 0, (count,), (1,))


ZEROS = Zeros()


def floats_in(size_bytes: float) -> int:
    """float32 numbers that make up a size, one at least: without any there is no gradient."""
    return max(1, math.ceil(size_bytes / FLOAT_BYTES))


class ReplayLayer(nn.Module):
    """A layer of a profile.

    Its backward pass takes its time where it is called for: not in the first layers of a
    network, as far as these have no parameters.

    Args:
        profile: its times and sizes, on this rank's device.
        pace: lets the time pass, in training.
    """

    weight_p: nn.Parameter | None

    def __init__(self, profile: LayerProfile, pace: Pace) -> None:
        super().__init__()
        self.profile = profile
        self.pace = pace
        size_bytes = profile.parameter_bytes
        weight = nn.Parameter(torch.zeros(floats_in(size_bytes))) if size_bytes else None
        self.register_parameter("weight_p", weight)

    def forward(self, value_n: Tensor) -> Tensor:
        """float32 [n] of this layer, from that of the layer before, of any length."""
        if not self.training:
            return ZEROS.of(floats_in(self.profile.activation_bytes))
        found: Tensor = _Replay.apply(value_n, self.weight_p, self)  # type: ignore[no-untyped-call]
        return found

    def extra_repr(self) -> str:
        return f"{self.profile.kind} {self.profile.index}"


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_n: Tensor, weight_p: Tensor | None, layer: ReplayLayer) -> Tensor:
        ctx.save_for_backward(value_n)  # as real layers do: what is recomputed takes its time again
        ctx.layer = layer
        ctx.counts = value_n.numel(), 0 if weight_p is None else weight_p.numel()
        ctx.set_materialize_grads(False)
        layer.pace.take(layer.profile.forward_s)
        return ZEROS.of(floats_in(layer.profile.activation_bytes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        del gradients  # whatever they are, those that follow are zeros
        _ = ctx.saved_tensors
        ctx.layer.pace.take(ctx.layer.profile.backward_s)
        of_value, of_weight = ctx.counts
        return (
            ZEROS.of(of_value) if ctx.needs_input_grad[0] else None,
            ZEROS.of(of_weight) if ctx.needs_input_grad[1] else None,
            None,
        )
