"""One pass over a network's layers, each alone: all forwards, then all backwards.

Each layer runs on the output of the layer before it, cut from its graph, right after that one: a
GPU is waited for only when all layers have been launched, as in a training step. What is derived
from coordinates is kept from layer to layer and counts for the layer that first uses it. A device
that is made slower pauses once behind the forwards and once behind the backwards, as in training;
the layers share the pause in proportion to their times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from sparsepipe.profiling.activations import copied, crossing_bytes, detached, differentiable
from sparsepipe.profiling.timing import Clock, Slowed
from sparsepipe.sparse import watching_kernel_maps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Figures of one pass over all layers, a list of one value a layer each.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
        kernel_map_s: seconds of the forward in which kernel maps are built.
        activation_bytes: bytes of the output.
        held_bytes: bytes that the forward has left in use, as CUDA counts; 0 elsewhere, as below.
        peak_bytes: most bytes in use beyond those before the forward.
    """

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    kernel_map_s: list[float] = field(default_factory=list)
    activation_bytes: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


def pass_over(
    layers: nn.Sequential, parts: Sequence[Any], device: torch.device, slowed: Slowed
) -> Pass:
    """One pass over each part of a batch: sums of seconds and activations, maxima of memory."""
    found = [one_pass(layers, part, device, slowed) for part in parts]
    if len(found) == 1:
        return found[0]
    merged: dict[str, Any] = {}
    for name in (entry.name for entry in fields(Pass)):
        merge: Any = max if name in ("held_bytes", "peak_bytes") else sum
        each_layer = zip(*(getattr(each, name) for each in found), strict=True)
        merged[name] = [merge(values) for values in each_layer]
    return Pass(**merged)


def one_pass(layers: nn.Sequential, batch: Any, device: torch.device, slowed: Slowed) -> Pass:
    """Forward through all layers in one go, then backward through all of them.

    The gradient of the last layer's output is random.
    """
    ends, found = _forward(layers, batch, device, slowed)
    layers.zero_grad(set_to_none=True)
    _backward(ends, found, device, slowed)
    layers.zero_grad(set_to_none=True)
    return found


def _forward(
    layers: nn.Sequential, batch: Any, device: torch.device, slowed: Slowed
) -> tuple[list[tuple[Any, Any]], Pass]:
    """Each layer's input and output in a graph of its own, and the figures."""
    whole, clock, builds = Clock(device), Clock(device), [Clock(device) for _ in layers]
    ends: list[tuple[Any, Any]] = []
    found = Pass()
    output = batch
    clock.synchronise()
    whole.mark()
    with slowed():
        for layer, build in zip(layers, builds, strict=True):
            value = detached(output)
            given = copied(value)  # a layer that works in place may overwrite no leaf
            with _memory(device) as used:
                clock.mark()
                with watching_kernel_maps(build.mark):
                    output = layer(given)
                clock.mark()
            found.held_bytes.append(used[0])
            found.peak_bytes.append(used[1])
            found.activation_bytes.append(crossing_bytes(output))
            ends.append((value, output))
        whole.mark()
    whole.mark()
    stretch = _stretch(whole)
    found.forward_s.extend(stretch * seconds for seconds in clock.seconds()[::2])
    found.kernel_map_s.extend(stretch * sum(build.seconds()[::2]) for build in builds)
    return ends, found


def _backward(
    ends: Sequence[tuple[Any, Any]], found: Pass, device: torch.device, slowed: Slowed
) -> None:
    """Run each layer's backward, and add its seconds and memory to the figures."""
    whole, clock = Clock(device), Clock(device)
    gradients = [torch.randn_like(root) for root in differentiable(ends[-1][1])]
    clock.synchronise()
    whole.mark()
    with slowed():
        for index, (value, output) in reversed(list(enumerate(ends))):
            roots = differentiable(output)
            with _memory(device) as used:
                clock.mark()
                if roots:  # a layer without parameters behind the data has no backward
                    torch.autograd.backward(roots, gradients)
                clock.mark()
            peak = found.held_bytes[index] + used[1]
            found.peak_bytes[index] = max(found.peak_bytes[index], peak)
            gradients = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in differentiable(value)
            ]
        whole.mark()
    whole.mark()
    stretch = _stretch(whole)
    found.backward_s.extend(stretch * seconds for seconds in clock.seconds()[::2][::-1])


def _stretch(whole: Clock) -> float:
    """Factor by which the pause behind a pass lengthens it."""
    computing_s, pausing_s = whole.seconds()
    return 1 + pausing_s / computing_s if computing_s > 0 else 1.0


@contextmanager
def _memory(device: torch.device) -> Iterator[list[int]]:
    """Bytes that the block leaves in use, and its peak, beyond those before it; 0 but on CUDA."""
    used = [0, 0]
    if device.type != "cuda":
        yield used
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield used
    used[0] = torch.cuda.memory_allocated(device) - before
    used[1] = torch.cuda.max_memory_allocated(device) - before
