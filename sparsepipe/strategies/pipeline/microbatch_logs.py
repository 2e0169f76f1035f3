"""What the steps of a minibatch's microbatches logged, as if one step had been run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparsepipe.strategies.pipeline.logs import Logged, Logs

_REDUCTIONS: Mapping[Any, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    torch.sum: sum,
    "max": max,
    torch.max: max,
    "min": min,
    torch.min: min,
}
"""Ways of ``self.log`` to reduce values other than their mean."""


def merged(parts: Sequence[tuple[int, Logs]]) -> Logs:
    """One minibatch's logs, from those of its microbatches.

    A value is reduced over microbatches as its ``reduce_fx`` says it is over steps; a mean counts
    each by its samples. What a call of a metric returned is averaged likewise, which counts for a
    step alone: its states are those of all samples.

    Args:
        parts: samples and logs of each, in their order.
    """
    if len(parts) == 1:
        return parts[0][1]
    found: dict[tuple[str, int], list[tuple[int, Logged]]] = {}
    for samples, logs in parts:
        calls: dict[str, int] = {}
        for note in logs:
            calls[note.name] = calls.get(note.name, -1) + 1
            found.setdefault((note.name, calls[note.name]), []).append((samples, note))
    return tuple(map(_one, found.values()))


def _one(notes: Sequence[tuple[int, Logged]]) -> Logged:
    """Of the same call in several microbatches."""
    first = notes[0][1]
    sizes = [note.options.get("batch_size") for _, note in notes]
    options = dict(first.options)
    if None not in sizes:
        options["batch_size"] = sum(size for size in sizes if size is not None)
    weights = [size or samples for size, (samples, _) in zip(sizes, notes, strict=True)]
    values = [note.value for _, note in notes if note.value is not None]
    value: Any = None
    dtype = first.dtype
    if len(values) == len(notes):
        reduce = _REDUCTIONS.get(options.get("reduce_fx", "mean"))
        value = _mean(values, weights) if reduce is None else reduce(values)
        if isinstance(value, float) and dtype is not None and not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
    return Logged(first.name, value, dtype, first.metric, options)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Weighted; of equal values it is that value, without any rounding."""
    if all(value == values[0] for value in values):
        return values[0]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
