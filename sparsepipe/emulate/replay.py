"""Layers that compute nothing but take the time of a profile.

Activations and gradients have their real sizes, so that sending and averaging them takes the real
time; they are zeros that share one memory, so that making them takes no CPU time. n: floats of an
activation, p: floats of a layer's parameters, r: rows of a microbatch, or of a minibatch that is
cut into microbatches, c: floats of a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.profiling import LayerProfile

_GRAIN_S = 0.001
"""Shorter pauses are added up, since the kernel's timer would dominate them."""
_MOST_CREDIT_S = 0.1
"""Most seconds of excess time of earlier pauses that are deducted from later ones."""


@dataclass(slots=True, eq=False)
class ReplayPace:
    """Pauses in place of computing: each may be inexact, but their sum is right.

    If a pause ends late, since many processes share few cores, the next pauses are shorter. So
    none needs to poll the clock, which would take cores from other ranks. All pauses are
    ``time_scale`` times as long as requested.
    """

    time_scale: float = 1.0
    _: KW_ONLY
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _owed_s: float = 0.0

    def take(self, seconds: float, *, since_s: float | None = None) -> None:
        """Pauses for ``seconds`` times ``time_scale``, less the time since ``since_s``.

        ``since_s`` is a time of ``clock``; None: nothing is subtracted.
        """
        worked_s = 0.0 if since_s is None else self.clock() - since_s
        self._owed_s += max(0.0, self.time_scale * seconds - worked_s)
        if self._owed_s < _GRAIN_S:
            return
        begin_s = self.clock()
        self.sleep(self._owed_s)
        self._owed_s = max(self._owed_s - (self.clock() - begin_s), -_MOST_CREDIT_S)


@dataclass(slots=True, eq=False)
class Zeros:
    """Tensors of zeros that share one memory; they must not be written to."""

    _memory: Tensor = field(default_factory=lambda: torch.zeros(0))

    def of(self, count: int, *more: int) -> Tensor:
        """Returns zeros, float32 [count, *more]."""
        shape = torch.Size((count, *more))
        if self._memory.numel() < shape.numel():
            self._memory = torch.zeros(shape.numel())
        strides = (*(shape[i + 1 :].numel() for i in range(len(shape))),)
        # Not a view, whose base autograd would track.
        return torch.empty(0).set_(self._memory.untyped_storage(), 0, shape, strides)


ZEROS = Zeros()


def shape_of(size_bytes: float, rows: int | None, *, of_rows: int | None = None) -> tuple[int, ...]:
    """The shape of a float32 tensor: (n,) for a minibatch of ``size_bytes``, or (r, c) if this is
    cut into microbatches. ``rows``: rows of the minibatch, None if it is not cut; ``of_rows``: r of
    a microbatch, None: all rows. n and c are at least 1, since a gradient needs one number.
    """
    floats = max(1, math.ceil(size_bytes / (rows or 1) / 4))
    if rows is None:
        return (floats,)
    return (rows if of_rows is None else of_rows, floats)


class ReplayLayer(nn.Module):
    """A layer that computes nothing but takes the times in ``profile``, on this rank's device.

    Its backward pass takes time only if autograd runs it, so not in a network's first layers if
    they have no parameters. If ``rows`` is the number of rows of a minibatch, a microbatch takes
    its share of the time and the bytes; if it is None, minibatches are not cut.
    """

    weight_p: nn.Parameter | None

    def __init__(self, profile: LayerProfile, pace: ReplayPace, *, rows: int | None = None) -> None:
        super().__init__()
        self.profile = profile
        self.pace = pace
        self.rows = rows
        size_bytes = profile.parameter_bytes
        weight = nn.Parameter(torch.zeros(shape_of(size_bytes, None))) if size_bytes else None
        self.register_parameter("weight_p", weight)

    def forward(self, value_n: Tensor) -> Tensor:
        """Returns the output, float32 [n] or [r, c], for any input; in training after a pause."""
        if not self.training:
            return self.output(value_n)
        found: Tensor = _Replay.apply(value_n, self.weight_p, self)  # type: ignore[no-untyped-call]
        return found

    def output(self, value_n: Tensor) -> Tensor:
        """Returns zeros in the shape of this layer's output for an input."""
        size_bytes = self.profile.activation_bytes
        return ZEROS.of(*shape_of(size_bytes, self.rows, of_rows=value_n.shape[0]))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_n: Tensor, weight_p: Tensor | None, layer: ReplayLayer) -> Tensor:
        ctx.save_for_backward(value_n)  # as real layers do: what is recomputed takes its time again
        # ctx.share: the input's share of its minibatch.
        ctx.layer, ctx.share = layer, value_n.shape[0] / layer.rows if layer.rows else 1.0
        ctx.shape, ctx.weight_p = value_n.shape, weight_p
        ctx.set_materialize_grads(False)
        layer.pace.take(ctx.share * layer.profile.forward_s)
        return layer.output(value_n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        del gradients  # whatever they are, the returned ones are zeros
        _ = ctx.saved_tensors
        ctx.layer.pace.take(ctx.share * ctx.layer.profile.backward_s)
        weight_p = ctx.weight_p
        needs_weight = ctx.needs_input_grad[1]
        if needs_weight and ctx.layer.rows is not None:
            # Adding zeros to those of an earlier microbatch would only take time.
            needs_weight = weight_p.grad is None
        return (
            ZEROS.of(*ctx.shape) if ctx.needs_input_grad[0] else None,
            ZEROS.of(weight_p.numel()) if needs_weight else None,
            None,
        )
