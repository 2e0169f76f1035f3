"""SmartProfile: each layer's forward and backward time, alone, on real batches.

Zhai et al., SparsePipe, section 4.1: 50 warm-up and 100 measured iterations, forward and
backward apart (:mod:`sparsepipe.profiling.passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from sparsepipe.errors import ProfileError
from sparsepipe.profiling.activations import crossing_bytes, fresh
from sparsepipe.profiling.memory import border_bytes, heaviest, layer_peaks, saved_bytes
from sparsepipe.profiling.passes import Pass, one_pass, pass_over
from sparsepipe.profiling.profile import LayerProfile, Profile
from sparsepipe.profiling.timing import Slowed, median_and_spread, step_seconds
from sparsepipe.profiling.update import MakeOptimizer, Updates

Cut = Callable[[Any], Sequence[Any]]
"""Gives the parts of a batch."""

_PASSES_A_STEP = 4
"""Measured passes for each step of the whole network and each update: amid them, so that a machine
whose speed changes with the minutes shows the same to all."""


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
    cut: Cut = lambda batch: [batch],
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
        optimizer: whose update of the whole network is timed, as is a copy of all weights, both
            shared by the layers in proportion to their parameters; None: layers have neither.
        between: is called after each pass with its number, to report or to stop.
        slowed: of a device that is made slower than it is.
        cut: gives the parts of a batch on which layers run one after another, as they do on
            microbatches. Times are then sums over them, and sizes go on being those of batches.

    Raises:
        ProfileError: there are no batches, or no passes.
    """
    _check(len(batches), num_warmup=num_warmup, num_measured=num_measured)
    updates = None
    if optimizer is not None:
        updates = Updates(layers, optimizer, device=device, slowed=slowed)
    with _training(layers):
        passes, steps_s = _measured(
            layers,
            batches,
            device=device,
            numbers=(num_warmup, num_measured),
            updates=updates,
            between=between,
            slowed=slowed,
            cut=cut,
        )
        sizes = _sizes(layers, batches, passes, device)
    shares_s = {} if updates is None else updates.shares_s(layers)
    amounts = {**sizes, **shares_s}
    rows = [  # unlike named_children(), with layers that occur twice
        _row(index, name, layer, passes, {key: float(of[index]) for key, of in amounts.items()})
        for index, (name, layer) in enumerate(zip(layers._modules, layers, strict=True))
    ]
    known = {
        "num_warmup": num_warmup,
        "num_measured": num_measured,
        "step_s": median_and_spread(steps_s)[0],
        "kind": "measured",
        "input_bytes": sum(map(crossing_bytes, batches)) / len(batches),
    }
    return Profile(layers=tuple(rows), meta={**known, **(meta or {})})


def _check(num_batches: int, *, num_warmup: int, num_measured: int) -> None:
    if num_batches < 1 or num_measured < 1 or num_warmup < 0:
        raise ProfileError(
            f"{num_batches} batches, {num_warmup} warm-up and {num_measured} measured passes",
            remedy="give one batch or more, and one measured pass or more",
        )


def _measured(
    layers: nn.Sequential,
    batches: Sequence[Any],
    *,
    device: torch.device,
    numbers: tuple[int, int],
    updates: Updates | None,
    between: Callable[[int], None] | None,
    slowed: Slowed,
    cut: Cut,
) -> tuple[list[Pass], list[float]]:
    """The measured passes, and seconds of whole steps between them."""
    passes: list[Pass] = []
    steps_s: list[float] = []
    with ExitStack() as afterwards:
        if updates is not None:
            afterwards.callback(updates.restore)
            updates.take(counts=False)
        for number in range(sum(numbers)):
            parts = cut(fresh(batches[number % len(batches)]))
            found = pass_over(layers, parts, device, slowed)
            if number >= numbers[0]:
                if len(passes) % _PASSES_A_STEP == 0:
                    parts = cut(fresh(batches[len(steps_s) % len(batches)]))
                    steps_s.append(
                        sum(step_seconds(layers, p, device=device, slowed=slowed) for p in parts)
                    )
                    if updates is not None:
                        updates.take()
                passes.append(found)
            if between is not None:
                between(number)
    return passes, steps_s


def _sizes(
    layers: nn.Sequential, batches: Sequence[Any], passes: Sequence[Pass], device: torch.device
) -> dict[str, list[float]]:
    """Bytes of each layer, by their names in a profile."""
    batch = heaviest(layers, batches)  # limits of memory are for the worst
    begins, ends = border_bytes(layers, batch)
    return {
        "parameter_bytes": _first_bytes(layers),
        "saved_bytes": saved_bytes(layers, batch),
        "begin_bytes": begins,
        "end_bytes": ends,
        "peak_bytes": _most([*passes, one_pass(layers, fresh(batch), device, nullcontext)])
        if device.type == "cuda"
        else [max(peaks) for peaks in zip(*layer_peaks(layers, batches), strict=True)],
    }


@contextmanager
def _training(layers: nn.Sequential) -> Iterator[None]:
    """Sets training mode; restores statistics of norm layers and the mode afterwards."""
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


def _most(passes: Sequence[Pass]) -> list[float]:
    return [float(max(peaks)) for peaks in zip(*(p.peak_bytes for p in passes), strict=True)]


def _first_bytes(layers: nn.Sequential) -> list[float]:
    """Parameter bytes of each layer; shared parameters count once."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {id(p): p for p in layer.parameters() if id(p) not in seen}
        found.append(float(sum(p.nbytes for p in own.values())))
        seen |= own.keys()
    return found


def _row(
    index: int, name: str, layer: nn.Module, passes: Sequence[Pass], sizes: dict[str, float]
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
