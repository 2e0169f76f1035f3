"""What each layer keeps for its backward pass: tensors that torch saves, and kernel maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sparsepipe.profiling.activations import coordinate_caches, fresh
from sparsepipe.sparse import CoordinateCache, derived_tensors


def saved_bytes(layers: nn.Sequential, batches: Sequence[Any]) -> list[float]:
    """Bytes that a forward pass keeps for each layer, mean over batches.

    Each storage counts once, for the first layer that saves it; parameters and buffers do not
    count, since they are there anyway. What the forward derives from coordinates (indices, kernel
    maps, gather plans) lives as long as the graph and counts for the layer that first asks for
    it; what only the backward derives does not count, nor what other libraries keep to themselves.

    Args:
        layers: the network, in the mode that is asked about; statistics of norm layers move on.
        batches: its inputs; they are left as they are.
    """
    sums = [0.0] * len(layers)
    for batch in batches:
        for index, size in enumerate(_saved_of(layers, fresh(batch))):
            sums[index] += size
    return [total / len(batches) for total in sums]


def _saved_of(layers: nn.Sequential, value: Any) -> list[int]:
    there = {t.untyped_storage().data_ptr() for t in chain(layers.parameters(), layers.buffers())}
    # All that was saved stays alive to the end: an address that is given out again would pass
    # for a storage that was counted.
    alive: dict[int, Tensor] = {}
    sizes: list[int] = []
    levels: list[CoordinateCache] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in there and place not in alive:
            sizes[-1] += storage.nbytes()
            alive[place] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        for layer in layers:
            sizes.append(0)
            levels += coordinate_caches(value)
            value = layer(value)
            for tensor in derived_tensors(levels):
                note(tensor)
    return sizes
