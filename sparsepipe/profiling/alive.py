"""How many bytes of tensors are alive, where the device does not count them itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from sparsepipe.profiling.activations import copied, detached, differentiable, fresh


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make while it is entered, until they are freed.

    It sees every operator of this thread, those inside autograd functions and temporaries between
    two operators too; not what a kernel takes and gives back by itself, nor what other libraries
    hold. A storage that was there before counts nothing. It is slow, so that nothing should be
    timed meanwhile.

    Attributes:
        bytes: alive now.
        peak_bytes: most that were since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = 0
        self._known: Any = WeakIdKeyDictionary()

    def restart(self) -> int:
        """Begins a new peak; what is alive now."""
        self.peak_bytes = self.bytes
        return self.bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operator; see torch's own documentation of modes."""
        named = dict(kwargs or {})
        for storage in _storages((args, named)):
            self._known.setdefault(storage, True)
        found = func(*args, **named)
        for storage in _storages(found):
            if storage not in self._known:
                self._known[storage] = True
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return found

    def _gone(self, size: int) -> None:
        self.bytes -= size


def layer_peaks(layers: nn.Sequential, batches: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Most bytes of tensors that each layer has alive beyond what was before its forward.

    What it gives and what it keeps for its backward counts, and what it needs for a moment; in
    the backward the gradients that it makes, but not the one that it gets.

    Args:
        layers: the network, in the mode that is asked about; statistics of norm layers move on,
            and parameters have no gradients afterwards.
        batches: its inputs, of which the one counts that takes most; they are left as they are.

    Returns:
        For each layer: in its forward, in its backward (0 without one).
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


def _storages(value: Any) -> list[UntypedStorage]:
    return [
        leaf.untyped_storage() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)
    ]
