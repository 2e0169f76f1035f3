"""A pass over a network's layers, timed one by one: all forwards, then all backwards.

Each layer runs on the detached output of the previous one. As in a training step, the
pass waits for a GPU only when all layers have been launched. Tensors derived from coordinates are
kept from layer to layer, and count for the layer that first uses them. A device that is made
slower pauses once after the forwards and once after the backwards, as in training; the layers
share the pause in proportion to their times.
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
    """Figures of a pass over all layers; each list has one value for each layer.

    Attributes:
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        kernel_map_s: seconds of the forward pass in which kernel maps are built.
        activation_bytes: bytes of the output.
        held_bytes: bytes that the forward pass leaves in use, by CUDA's allocator; 0 on a CPU.
        peak_bytes: most bytes in use in the forward or backward pass, beyond those in use before
            the forward pass, by CUDA's allocator; 0 on a CPU.
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
    """Runs a pass over each part of a batch; returns, for each layer, sums of seconds and
    activation bytes over the parts, and maxima of memory.
    """
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
    """Times all layers forward, then all backward from a random gradient of the last output."""
    ends, found = _forward(layers, batch, device, slowed)
    layers.zero_grad(set_to_none=True)
    _backward(ends, found, device, slowed)
    layers.zero_grad(set_to_none=True)
    return found


def _forward(
    layers: nn.Sequential, batch: Any, device: torch.device, slowed: Slowed
) -> tuple[list[tuple[Any, Any]], Pass]:
    """Runs all layers forward; returns each layer's input and output, and the figures so far."""
    whole, clock, builds = Clock(device), Clock(device), [Clock(device) for _ in layers]
    ends: list[tuple[Any, Any]] = []
    found = Pass()
    output = batch
    clock.synchronise()
    whole.mark()
    with slowed():
        for layer, build in zip(layers, builds, strict=True):
            value = detached(output)
            given = copied(value)  # an in-place layer must not overwrite a leaf
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
    """Runs all layers backward, and adds their seconds and memory to ``found``."""
    whole, clock = Clock(device), Clock(device)
    gradients = [torch.randn_like(root) for root in differentiable(ends[-1][1])]
    clock.synchronise()
    whole.mark()
    with slowed():
        for index, (value, output) in reversed(list(enumerate(ends))):
            roots = differentiable(output)
            with _memory(device) as used:
                clock.mark()
                if roots:  # a first layer without parameters has no backward
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
    """Factor by which the pause between the last two marks lengthens the computation."""
    computing_s, pausing_s = whole.seconds()
    return 1 + pausing_s / computing_s if computing_s > 0 else 1.0


@contextmanager
def _memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list of the bytes that the block has left and its peak; zeros except on CUDA."""
    used = [0, 0]
    if device.type != "cuda":
        yield used
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield used
    used[0] = torch.cuda.memory_allocated(device) - before
    used[1] = torch.cuda.max_memory_allocated(device) - before
