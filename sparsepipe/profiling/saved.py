"""What each layer keeps for its backward pass, by torch's own count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsepipe.profiling.activations import detached


def saved_bytes(layers: nn.Sequential, batches: Sequence[Any]) -> list[float]:
    """Bytes that a forward pass keeps for each layer, mean over batches.

    Each storage counts once, for the first layer that saves it; parameters do not count, since
    they are there anyway. Buffers are left as they were.

    Args:
        layers: the network.
        batches: its inputs.
    """
    sums = [0.0] * len(layers)
    for batch in batches:
        seen = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}
        value = batch
        for index, layer in enumerate(layers):
            kept: dict[int, int] = {}

            def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                kept.setdefault(storage.data_ptr(), storage.nbytes())
                return tensor

            value = detached(value) if index else value
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                value = layer(value)
            sums[index] += sum(size for place, size in kept.items() if place not in seen)
            seen |= kept.keys()
    return [total / len(batches) for total in sums]
