"""What autograd functions keep for their backward beside tensors: kernel maps and indices.

Torch lets the tensors that a function saves go where activations are recomputed
(``torch.utils.checkpoint``), and gives it those of the second run; what else hangs on a function's
context stays. Inside of :func:`letting_derived_go` kernel maps go the way of the tensors: they hang
on an empty tensor that is saved with them, on its storage, which is one and the same however often
the tensor itself is wrapped anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_letting_go: ContextVar[bool] = ContextVar("letting_go", default=False)


@contextmanager
def letting_derived_go() -> Iterator[None]:
    """Functions that run inside keep what is derived from coordinates as they keep tensors.

    To be entered for the first run and for the second one.
    """
    token = _letting_go.set(True)
    try:
        yield
    finally:
        _letting_go.reset(token)


def save(ctx: Any, *tensors: Tensor, derived: Any) -> None:
    """Keeps tensors, and what is derived from coordinates, for :func:`saved`.

    Args:
        ctx: of a ``torch.autograd.Function``, in its forward.
        tensors: its inputs, outputs or others.
        derived: a kernel map, or indices.
    """
    if not _letting_go.get():
        ctx.derived = derived
        ctx.save_for_backward(*tensors)
        return
    carrier = torch.empty(0)
    carrier.untyped_storage().derived = derived  # type: ignore[attr-defined]
    ctx.derived = None
    ctx.save_for_backward(*tensors, carrier)


def saved(ctx: Any) -> tuple[tuple[Tensor, ...], Any]:
    """What :func:`save` has kept: the tensors, and what is derived from coordinates."""
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    if ctx.derived is not None:
        return tensors, ctx.derived
    *tensors_, carrier = tensors
    return tuple(tensors_), carrier.untyped_storage().derived  # type: ignore[attr-defined]
