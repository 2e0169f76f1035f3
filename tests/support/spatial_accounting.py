"""Bytes that shards send and keep: what the algebra says of a network, and what is counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from sparsepipe.models.chain import Resized, parted
from sparsepipe.runtime.collectives.halo import start_messages
from sparsepipe.spatial import grid as grid_module
from sparsepipe.spatial.convolution import as_tuple
from sparsepipe.spatial.intervals import Interval, Window, exchanges, sent_bytes, shares
from sparsepipe.spatial.shard import local_of


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each group of messages that this rank sends."""
    found: list[int] = []

    def counting(sends: Sequence[tuple[int, Tensor]], *rest: Any, **more: Any) -> Any:
        found.append(sum(tensor.numel() * tensor.element_size() for _, tensor in sends))
        return start_messages(sends, *rest, **more)

    with patch.object(grid_module, "start_messages", counting):
        yield found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward pass, storages counted once, without parameters."""
    theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local_of(tensor).untyped_storage()  # what is checkpointed keeps a shard itself
        if storage.data_ptr() not in theirs:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is given out twice
        return tensor

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What the ranks of a grid send for a layer.

    Args:
        sent: bytes of each rank in the forward pass.
        passes: how often all ranks together send as many in a training step: halos, halos again
            where the layer keeps none, once more where activations are computed again, and
            gradients of halos.
    """

    sent: tuple[int, ...]
    passes: int


def layers_of(model: nn.Module, x: Tensor, parts: Sequence[int]) -> list[LayerBytes]:
    """Of the layers that need halos, in a forward pass of one process on a whole sample."""
    found: list[LayerBytes] = []

    again = {
        layer
        for block in model.modules()
        if getattr(block, "checkpointing", False)
        for layer in block.modules()
    }

    def note(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        value, output = parted(args[0])[0], parted(result)[0]
        if isinstance(module, Resized):
            found.append(LayerBytes(_resized(value, output, parts), 2))
            return
        count = value.dim() - 2
        windows = [_window(module, axis, value, output) for axis in range(count)]
        position_bytes = value.shape[0] * value.shape[1] * value.element_size()
        sent = sent_bytes(windows, value.shape[2:], parts, position_bytes=position_bytes)
        passes = 3 if found else 2  # the sample itself needs no gradient
        found.append(LayerBytes(sent, passes + (module in again)))

    kinds = (_ConvNd, _MaxPoolNd, _AvgPoolNd, Resized)
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note)
    model(x)
    return found


def _window(module: Any, axis: int, value: Tensor, output: Tensor) -> Window:
    def of(name: str) -> int:
        return as_tuple(getattr(module, name), value.dim() - 2)[axis]

    common = {"kernel": of("kernel_size"), "stride": of("stride")}
    padding = {"before": of("padding"), "after": of("padding")}
    if isinstance(module, _AvgPoolNd | _MaxPoolNd):
        dilation = of("dilation") if isinstance(module, _MaxPoolNd) else 1
        return Window(**common, **padding, dilation=dilation, ceil_mode=bool(module.ceil_mode))
    window = Window(**common, **padding, dilation=of("dilation"))
    if isinstance(module, _ConvTransposeNd):
        window = Window(**common, **padding, dilation=of("dilation"), transposed=True)
        more = output.shape[2 + axis] - window.output_size(value.shape[2 + axis])
        window = Window(
            **common, **padding, dilation=of("dilation"), transposed=True, output_padding=more
        )
    assert window.output_size(value.shape[2 + axis]) == output.shape[2 + axis]
    return window


def _resized(value: Tensor, output: Tensor, parts: Sequence[int]) -> tuple[int, ...]:
    """Linear interpolation, one dimension after the other; an output has two neighbours."""
    sizes = list(value.shape[2:])
    found = dict.fromkeys(itertools.product(*map(range, parts)), 0)
    for axis, (n, m) in enumerate(zip(list(sizes), output.shape[2:], strict=True)):
        if n == m:
            continue
        places = [max((o + 0.5) * n / m - 0.5, 0.0) for o in range(m)]
        needs = [
            Interval(math.floor(places[each.start]), min(math.floor(places[each.stop - 1]) + 2, n))
            for each in shares(m, parts[axis])
        ]
        plans = exchanges(n, tuple((each,) for each in needs))
        for place in found:
            held = [shares(s, p)[c].size for s, p, c in zip(sizes, parts, place, strict=True)]
            others = math.prod(held[:axis]) * math.prod(held[axis + 1 :])
            found[place] += plans[place[axis]].sent * others
        sizes[axis] = m
    lead = value.shape[0] * value.shape[1] * value.element_size()
    return tuple(each * lead for each in found.values())
