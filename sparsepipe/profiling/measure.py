"""SmartProfile: each layer's forward and backward time, alone, on real batches.

Zhai et al., SparsePipe, section 4.1: 50 warm-up and 100 measured iterations, forward and
backward apart. Each layer runs on what the layer before it gave, cut from its graph, so that its
backward can be timed alone; the gradient that it gets is that of the layer behind it, for the
last one random. The layers of a pass run one right after another, and a GPU is waited for only
when all have been launched, so that what it does while the host prepares the next layer is
counted as in a training step. What is derived from coordinates, such as kernel maps, is kept
from layer to layer, as in a forward pass, and counts for the layer that first asks for it.

A device that is made slower pauses once behind each pass, as it does in training: pauses between
layers would cool the caches that the next layer finds warm there. The layers share the pause in
proportion to their times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.activations import copied, crossing_bytes, detached, differentiable, fresh
from sparsepipe.profiling.alive import layer_peaks
from sparsepipe.profiling.clock import Clock, median_and_spread
from sparsepipe.profiling.profile import LayerProfile, Profile
from sparsepipe.profiling.saved import border_bytes, heaviest, saved_bytes
from sparsepipe.profiling.step import Slowed, step_seconds
from sparsepipe.profiling.update import MakeOptimizer, Updates
from sparsepipe.sparse import watching_kernel_maps

_PASSES_A_STEP = 4
"""Measured passes for each step of the whole network and each update: amid them, so that a machine
whose speed changes with the minutes shows the same to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Seconds of one pass over all layers, by layer.

    Attributes:
        forward_s: of each layer.
        backward_s: of each layer.
        kernel_map_s: the part of the forward pass in which kernel maps are built.
        activation_bytes: of each layer's output.
        held_bytes: what each layer's forward has left in use, as CUDA counts it; 0 elsewhere.
        peak_bytes: most that each layer took beyond what was in use before its forward, the same.
    """

    forward_s: list[float]
    backward_s: list[float]
    kernel_map_s: list[float]
    activation_bytes: list[int]
    held_bytes: list[int]
    peak_bytes: list[int]


def measure(
    layers: nn.Sequential,
    batches: Sequence[Any],
    *,
    device: torch.device,
    num_warmup: int = 50,
    num_measured: int = 100,
    meta: dict[str, Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    between: Callable[[int], None] | None = None,
    slowed: Slowed = nullcontext,
) -> Profile:
    """Times the layers of a network.

    Args:
        layers: the network, on ``device``.
        batches: inputs of the network on ``device``, which take turns; without anything that
            was computed from them.
        device: where it runs.
        num_warmup: passes before those that count.
        num_measured: passes that count; medians and quartiles are taken over them.
        meta: what else is known beside ``step_s``, the median time of the whole network in one
            piece, see :class:`~sparsepipe.profiling.profile.Profile`.
        optimizer: whose update of the whole network is timed, and shared by its layers in
            proportion to their parameters; None: layers have no time of an update.
        between: is called after each pass with its number, to report or to stop.
        slowed: of a device that is made slower than it is.

    Raises:
        ProfileError: there are no batches, or no passes.
    """
    if not batches or num_measured < 1 or num_warmup < 0:
        raise ProfileError(
            f"{len(batches)} batches, {num_warmup} warm-up and {num_measured} measured passes",
            remedy="give one batch or more, and one measured pass or more",
        )
    passes: list[_Pass] = []
    steps_s: list[float] = []
    updates = None
    if optimizer is not None:
        updates = Updates(layers, optimizer, device=device, slowed=slowed)
    with _training(layers), ExitStack() as afterwards:
        if updates is not None:
            afterwards.callback(updates.put_back)
            updates.take(counts=False)
        for number in range(num_warmup + num_measured):
            found = _one_pass(layers, fresh(batches[number % len(batches)]), device, slowed)
            if number >= num_warmup:
                if len(passes) % _PASSES_A_STEP == 0:
                    value = fresh(batches[len(steps_s) % len(batches)])
                    steps_s.append(step_seconds(layers, value, device=device, slowed=slowed))
                    if updates is not None:
                        updates.take()
                passes.append(found)
            if between is not None:
                between(number)
        sizes = _sizes(layers, batches, passes, device)
    if updates is not None:
        sizes["update_s"] = updates.shares_s(layers)
    rows = [  # not named_children(), which tells a layer that comes twice once
        _row(index, name, layer, passes, {key: float(of[index]) for key, of in sizes.items()})
        for index, (name, layer) in enumerate(zip(layers._modules, layers, strict=True))
    ]
    told = {
        "num_warmup": num_warmup,
        "num_measured": num_measured,
        "step_s": median_and_spread(steps_s)[0],
        "kind": "measured",
    }
    entry = {"input_bytes": sum(map(crossing_bytes, batches)) / len(batches)}
    return Profile(layers=tuple(rows), meta={**told, **entry, **(meta or {})})


def _sizes(
    layers: nn.Sequential, batches: Sequence[Any], passes: Sequence[_Pass], device: torch.device
) -> dict[str, list[float]]:
    """Bytes of each layer, by what they are called in a profile."""
    batch = heaviest(layers, batches)  # limits of memory are for the worst
    begins, ends = border_bytes(layers, batch)
    return {
        "parameter_bytes": _first_bytes(layers),
        "saved_bytes": saved_bytes(layers, batch),
        "begin_bytes": begins,
        "end_bytes": ends,
        "peak_bytes": _most(passes)
        if device.type == "cuda"
        else [max(peaks) for peaks in zip(*layer_peaks(layers, batches), strict=True)],
    }


@contextmanager
def _training(layers: nn.Sequential) -> Iterator[None]:
    """In training mode; statistics of norm layers and the mode are put back afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in layers.buffers()]
    modes = [(module, module.training) for module in layers.modules()]
    layers.train()
    try:
        yield
    finally:
        for buffer, was in buffers:
            buffer.copy_(was)
        for module, mode in modes:
            module.training = mode


def _one_pass(layers: nn.Sequential, batch: Any, device: torch.device, slowed: Slowed) -> _Pass:
    """Forward through all layers in one go, then backward through all of them."""
    ends, found = _forward(layers, batch, device, slowed)
    layers.zero_grad(set_to_none=True)
    _backward(ends, found, device, slowed)
    layers.zero_grad(set_to_none=True)
    return found


def _forward(
    layers: nn.Sequential, batch: Any, device: torch.device, slowed: Slowed
) -> tuple[list[tuple[Any, Any]], _Pass]:
    """What each layer got, as leaves, and gave, each in a graph of its own; and the figures."""
    whole, clock, builds = Clock(device), Clock(device), [Clock(device) for _ in layers]
    ends: list[tuple[Any, Any]] = []
    found = _Pass(
        forward_s=[],
        backward_s=[],
        kernel_map_s=[],
        activation_bytes=[],
        held_bytes=[],
        peak_bytes=[],
    )
    output = batch
    clock.synchronise()
    whole.mark()
    with slowed():
        for layer, build in zip(layers, builds, strict=True):
            value = detached(output)
            given = copied(value)  # a layer that works in place may overwrite no leaf
            before = _begin_peak(device)
            clock.mark()
            with watching_kernel_maps(build.mark):
                output = layer(given)
            clock.mark()
            found.peak_bytes.append(_peak(device, before))
            found.held_bytes.append(_in_use(device) - before)
            found.activation_bytes.append(crossing_bytes(output))
            ends.append((value, output))
        whole.mark()
    whole.mark()
    stretch = _stretch(whole)
    found.forward_s.extend(stretch * seconds for seconds in clock.seconds()[::2])
    found.kernel_map_s.extend(stretch * sum(build.seconds()[::2]) for build in builds)
    return ends, found


def _backward(
    ends: Sequence[tuple[Any, Any]], found: _Pass, device: torch.device, slowed: Slowed
) -> None:
    """Each layer's way back: adds its seconds, and the memory that it takes, to the figures."""
    whole, clock = Clock(device), Clock(device)
    gradients = [torch.randn_like(root) for root in differentiable(ends[-1][1])]
    clock.synchronise()
    whole.mark()
    with slowed():
        for index, (value, output) in reversed(list(enumerate(ends))):
            roots = differentiable(output)
            before = _begin_peak(device)
            clock.mark()
            if roots:  # a layer without parameters behind the data has no way back
                torch.autograd.backward(roots, gradients)
            clock.mark()
            peak = found.held_bytes[index] + _peak(device, before)
            found.peak_bytes[index] = max(found.peak_bytes[index], peak)
            gradients = [_gradient(leaf) for leaf in differentiable(value)]
        whole.mark()
    whole.mark()
    stretch = _stretch(whole)
    found.backward_s.extend(stretch * seconds for seconds in clock.seconds()[::2][::-1])


def _stretch(whole: Clock) -> float:
    """How many times as long a pass takes with the pause behind it; marked before and after."""
    computing_s, pausing_s = whole.seconds()
    return 1 + pausing_s / computing_s if computing_s > 0 else 1.0


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _begin_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return _in_use(device)


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device, before: int) -> int:
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0


def _most(passes: Sequence[_Pass]) -> list[float]:
    return [float(max(peaks)) for peaks in zip(*(p.peak_bytes for p in passes), strict=True)]


def _first_bytes(layers: nn.Sequential) -> list[float]:
    """Bytes of the parameters of each layer; those that come again count once."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {id(p): p for p in layer.parameters() if id(p) not in seen}
        found.append(float(sum(p.nbytes for p in own.values())))
        seen |= own.keys()
    return found


def _row(
    index: int, name: str, layer: nn.Module, passes: Sequence[_Pass], sizes: dict[str, float]
) -> LayerProfile:
    forward_s, forward_spread_s = median_and_spread([p.forward_s[index] for p in passes])
    backward_s, backward_spread_s = median_and_spread([p.backward_s[index] for p in passes])
    kernel_map_s, _ = median_and_spread([p.kernel_map_s[index] for p in passes])
    return LayerProfile(
        index=index,
        name=name,
        kind=type(layer).__name__,
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=sum(p.activation_bytes[index] for p in passes) / len(passes),
        forward_spread_s=forward_spread_s,
        backward_spread_s=backward_spread_s,
        kernel_map_s=kernel_map_s,
        **sizes,
    )
