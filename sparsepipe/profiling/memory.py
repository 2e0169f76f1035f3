"""Bytes that layers save for their backward, and the most bytes of tensors alive at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from sparsepipe.profiling.activations import (
    coordinate_caches,
    copied,
    detached,
    differentiable,
    fresh,
    tensors_in,
)
from sparsepipe.sparse import CoordinateCache, derived_tensors


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operators make within the ``with`` block, until they are freed.

    It sees every operator of this thread, even inside autograd functions, but neither the scratch
    memory of a kernel nor the memory of other libraries. Storages from before the block do not
    count. It slows operators down, so nothing should be timed within the block.

    Attributes:
        bytes: bytes alive now.
        peak_bytes: most bytes alive at a time since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = 0
        self._known: Any = WeakIdKeyDictionary()

    def restart(self) -> int:
        """Resets ``peak_bytes`` to the bytes that are alive now, and returns them."""
        self.peak_bytes = self.bytes
        return self.bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        for tensor in tensors_in((args, named)):
            self._known.setdefault(tensor.untyped_storage(), True)
        found = func(*args, **named)
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = True
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return found

    def _gone(self, size: int) -> None:
        self.bytes -= size


def layer_peaks(layers: nn.Sequential, batches: Sequence[Any]) -> tuple[list[float], list[float]]:
    """For each layer, the most bytes of tensors alive in its forward pass, and those in its
    backward pass (0 without one), beyond those alive before its forward pass, for the batch that
    needs most.

    They cover the layer's output, the tensors that it saves for its backward pass, temporaries and,
    in the backward pass, the gradients that it makes, but not the gradient that it receives. The
    pass updates the statistics of norm layers and leaves parameters without gradients.
    """
    forward, backward = [0.0] * len(layers), [0.0] * len(layers)
    for batch in batches:
        with Alive() as alive:
            value = fresh(batch)
            for index, layer in enumerate(layers):
                layer.zero_grad(set_to_none=True)
                given = copied(detached(value))
                before = alive.restart()
                output = layer(given)
                forward[index] = max(forward[index], alive.peak_bytes - before)
                held = alive.bytes - before
                if roots := differentiable(output):
                    gradients = [torch.ones_like(root) for root in roots]
                    before = alive.restart()
                    torch.autograd.backward(roots, gradients)
                    backward[index] = max(backward[index], held + alive.peak_bytes - before)
                    del gradients
                    layer.zero_grad(set_to_none=True)
                value = detached(output)
                del roots, output
    return forward, backward


def heaviest(layers: nn.Sequential, batches: Sequence[Any]) -> Any:
    """The batch for which a forward pass saves the most bytes; updates norm layers' statistics."""
    return max(batches, key=lambda batch: sum(saved_bytes(layers, batch)))


def saved_bytes(layers: nn.Sequential, batch: Any) -> list[float]:
    """Bytes that each layer saves in a forward pass in the network's current mode, training or not.

    Each storage counts once, for the first layer that saves it; parameters and buffers do not
    count. Tensors that the forward pass derives from coordinates (indices, kernel maps, gather
    plans) live as long as the autograd graph and count for the layer that first uses them; those
    that only the backward pass derives, and the memory of other libraries, do not count. The batch
    does not change, but the pass updates the statistics of norm layers.
    """
    return [float(size) for size in Kept(list(layers), fresh(batch)).sizes]


def border_bytes(layers: nn.Sequential, batch: Any) -> tuple[list[float], list[float]]:
    """For each layer, the bytes that a stage beginning with it keeps in addition to the
    :func:`saved_bytes` of its layers, and those that a stage ending with it keeps in addition.

    A stage keeps the input that it received, and derives again from coordinates what earlier stages
    have derived; it also keeps the output of its last layer. For each first layer, a pass measures
    this up to the layer after which no received tensor is left; from there on, a stage keeps as
    much as a pass through all layers.
    """
    whole = Kept(list(layers), fresh(batch))
    begins, value = [], fresh(batch)
    for first, layer in enumerate(layers):
        received = _received(value)
        before = {mark for border in whole.borders[: first + 1] for mark in border}
        ends = range(first + 1, len(whole.borders))
        end = next((e for e in ends if not whole.borders[e] & before), ends[-1])
        rest = Kept(list(layers)[first:end], received, received=True)
        begins.append(float(max(0, sum(rest.sizes) - sum(whole.sizes[first:end]))))
        value = layer(_received(value))
    return begins, [float(size) for size in whole.outputs]


def _received(value: Any) -> Any:
    """A copy without kernel maps; layers may overwrite its tensors, since these are not leaves."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad).clone(), value
    )


class Kept:
    """Storages that a forward pass of ``layers`` on ``value`` saves, each counted once.

    If ``value`` was ``received`` from another stage, it counts for the first layer.

    Attributes:
        sizes: for each layer, the bytes that it is the first to save.
        outputs: for each layer, the bytes of its output that no layer so far has saved.
        borders: identifiers of the tensors and coordinate caches that enter each layer and that
            leave the last.
    """

    def __init__(self, layers: Sequence[nn.Module], value: Any, *, received: bool = False) -> None:
        own = chain.from_iterable((*layer.parameters(), *layer.buffers()) for layer in layers)
        self._there = {tensor.untyped_storage().data_ptr() for tensor in own}
        # Saved tensors stay alive to the end: a new storage at a freed address would seem to have
        # been counted.
        self._alive: dict[int, Tensor] = {}
        self.sizes: list[int] = []
        self.outputs: list[int] = []
        self.borders: list[set[int]] = []
        passed: list[Any] = []  # kept alive, so that no identifier is used twice
        levels: list[CoordinateCache] = []
        with saved_tensors_hooks(self._note, lambda tensor: tensor):
            for layer in layers:
                passed.append(self._mark(value))
                self.sizes.append(0)
                if received and len(self.sizes) == 1:
                    for leaf in tensors_in(value):
                        self._note(leaf)
                levels += coordinate_caches(value)
                value = layer(value)
                for tensor in derived_tensors(levels):
                    self._note(tensor)
                given = {t.untyped_storage().data_ptr(): t for t in tensors_in(value)}
                left = given.keys() - self._there - self._alive.keys()
                self.outputs.append(sum(given[at].untyped_storage().nbytes() for at in left))
        self._mark(value)

    def _note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's storage for the present layer, unless it was counted before."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._there and place not in self._alive:
            self.sizes[-1] += storage.nbytes()
            self._alive[place] = tensor.detach()
        return tensor.detach()

    def _mark(self, value: Any) -> Any:
        """Records the identifiers of tensors and caches; returns what keeps them unique."""
        caches, tensors = coordinate_caches(value), [t.detach() for t in tensors_in(value)]
        marks = {id(cache) for cache in caches}
        self.borders.append(marks | {tensor.untyped_storage().data_ptr() for tensor in tensors})
        return caches, tensors
