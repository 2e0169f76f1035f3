"""SmartProfile: the forward and backward times of single layers on real batches.

As in Zhai et al., SparsePipe, section 4.1, 50 warm-up iterations precede 100 measured ones, and
forward and backward are timed separately (:mod:`sparsepipe.profiling.passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.activations import crossing_bytes, fresh
from sparsepipe.profiling.memory import border_bytes, heaviest, layer_peaks, saved_bytes
from sparsepipe.profiling.passes import Pass, one_pass, pass_over
from sparsepipe.profiling.profile import LayerProfile, Profile
from sparsepipe.profiling.timing import (
    MakeOptimizer,
    Slowed,
    Updates,
    median_and_spread,
    own_bytes,
    step_seconds,
)

Cut = Callable[[Any], Sequence[Any]]
"""Cuts a batch into microbatches."""

_PASSES_A_STEP = 4
"""Number of measured passes for each timed step of the whole network and for each timed update.
Both are spread among the passes, so that changes of the machine's speed affect all alike."""


def measure(
    layers: nn.Sequential,
    batches: Sequence[Any],
    *,
    device: torch.device,
    num_warmup: int = 50,
    num_measured: int = 100,
    meta: dict[str, Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    between: Callable[[int], None] = lambda number: None,
    slowed: Slowed = nullcontext,
    cut: Cut = lambda batch: [batch],
) -> Profile:
    """Times the layers of a network.

    Args:
        layers: the network, on ``device``.
        batches: inputs of the network, on ``device``, used in turn; nothing has been computed from
            them yet.
        device: the device that computes.
        num_warmup: number of passes before the measured ones.
        num_measured: number of measured passes, from which medians and quartiles are taken.
        meta: further entries for the profile's ``meta``; ``step_s`` there is the median time of a
            forward and backward of the whole network.
        optimizer: makes the optimizer whose update of the whole network is timed, as is a copy of
            all weights; None: neither is timed.
        between: called after each pass with its number, from 0, to report or to stop.
        slowed: makes the context in which a computation takes as long as on a slower device.
        cut: cuts a batch into parts on which the network runs one after another. Times are then
            sums over the parts, but sizes are those of whole batches.
    """
    if not batches or num_measured < 1 or num_warmup < 0:
        raise ProfileError(
            f"a profile cannot be measured from so few batches ({len(batches)}), warm-up passes "
            f"({num_warmup}) or measured passes ({num_measured})",
            remedy="give at least 1 batch, 0 warm-up passes and 1 measured pass",
        )
    updates = optimizer and Updates(layers, optimizer, device=device, slowed=slowed)
    with _training(layers):
        try:
            passes, steps_s = _passes_and_steps(
                layers,
                batches,
                device=device,
                num_warmup=num_warmup,
                num_measured=num_measured,
                updates=updates,
                between=between,
                slowed=slowed,
                cut=cut,
            )
        finally:
            if updates is not None:
                updates.restore()
        amounts = _sizes(layers, batches, passes, device)
    if updates is not None:
        amounts |= updates.shares_s(layers)
    known = {
        "num_warmup": num_warmup,
        "num_measured": num_measured,
        "step_s": median_and_spread(steps_s)[0],
        "kind": "measured",
        "input_bytes": sum(map(crossing_bytes, batches)) / len(batches),
    }
    return Profile(layers=_rows(layers, passes, amounts), meta={**known, **(meta or {})})


def _passes_and_steps(
    layers: nn.Sequential,
    batches: Sequence[Any],
    *,
    device: torch.device,
    num_warmup: int,
    num_measured: int,
    updates: Updates | None,
    between: Callable[[int], None],
    slowed: Slowed,
    cut: Cut,
) -> tuple[list[Pass], list[float]]:
    """Runs all passes; returns the measured ones, and the seconds of the whole network's steps."""
    passes: list[Pass] = []
    steps_s: list[float] = []
    if updates is not None:
        updates.take(counts=False)
    for number in range(num_warmup + num_measured):
        parts = cut(fresh(batches[number % len(batches)]))
        found = pass_over(layers, parts, device, slowed)
        if number >= num_warmup:
            if len(passes) % _PASSES_A_STEP == 0:
                parts = cut(fresh(batches[len(steps_s) % len(batches)]))
                steps_s.append(
                    sum(step_seconds(layers, part, device=device, slowed=slowed) for part in parts)
                )
                if updates is not None:
                    updates.take()
            passes.append(found)
        between(number)
    return passes, steps_s


def _rows(
    layers: nn.Sequential, passes: Sequence[Pass], amounts: dict[str, list[float]]
) -> tuple[LayerProfile, ...]:
    """The layers' profiles with medians over passes; ``amounts`` are further fields by name."""
    rows = []
    # named_children() would leave out the repetitions of a layer that occurs twice.
    for index, (name, layer) in enumerate(zip(layers._modules, layers, strict=True)):
        forward_s, forward_spread_s = median_and_spread([p.forward_s[index] for p in passes])
        backward_s, backward_spread_s = median_and_spread([p.backward_s[index] for p in passes])
        rows.append(
            LayerProfile(
                index=index,
                name=name,
                kind=type(layer).__name__,
                forward_s=forward_s,
                backward_s=backward_s,
                activation_bytes=sum(p.activation_bytes[index] for p in passes) / len(passes),
                forward_spread_s=forward_spread_s,
                backward_spread_s=backward_spread_s,
                kernel_map_s=median_and_spread([p.kernel_map_s[index] for p in passes])[0],
                **{key: float(values[index]) for key, values in amounts.items()},
            )
        )
    return tuple(rows)


def _sizes(
    layers: nn.Sequential, batches: Sequence[Any], passes: Sequence[Pass], device: torch.device
) -> dict[str, list[float]]:
    """Bytes of each layer, by the name of their field in :class:`LayerProfile`."""
    batch = heaviest(layers, batches)  # the worst batch must fit the memory
    begins, ends = border_bytes(layers, batch)
    if device.type == "cuda":
        whole = one_pass(layers, fresh(batch), device, nullcontext)
        peaks = [list(map(float, each.peak_bytes)) for each in (*passes, whole)]
    else:
        peaks = list(layer_peaks(layers, batches))
    return {
        "parameter_bytes": list(map(float, own_bytes(layers))),
        "saved_bytes": saved_bytes(layers, batch),
        "begin_bytes": begins,
        "end_bytes": ends,
        "peak_bytes": [max(each) for each in zip(*peaks, strict=True)],
    }


@contextmanager
def _training(layers: nn.Sequential) -> Iterator[None]:
    """Sets training mode within the block, and restores all modes and buffers afterwards."""
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
