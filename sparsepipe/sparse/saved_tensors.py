"""Kernel maps and indices saved for the backward pass, freed under activation checkpointing.

``torch.utils.checkpoint`` frees the tensors that a function saves and replaces them with those of
the recomputed forward, but keeps all other attributes of the function's context. Within
:func:`derived_saved_with_tensors` kernel maps are therefore attached to an empty tensor that is
saved with the others: to its storage, which stays the same however often torch wraps the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_with_tensors: ContextVar[bool] = ContextVar("with_tensors", default=False)


@contextmanager
def derived_saved_with_tensors() -> Iterator[None]:
    """Makes autograd functions in the block free kernel maps and indices with saved tensors.

    It must be entered for the first forward pass and for the recomputed one.
    """
    token = _with_tensors.set(True)
    try:
        yield
    finally:
        _with_tensors.reset(token)


def save(ctx: Any, *tensors: Tensor, derived: Any) -> None:
    """Saves tensors and an object derived from coordinates, which :func:`saved` returns later."""
    if not _with_tensors.get():
        ctx.derived = derived
        ctx.save_for_backward(*tensors)
        return
    carrier = torch.empty(0)
    carrier.untyped_storage().derived = derived  # type: ignore[attr-defined]
    ctx.derived = None
    ctx.save_for_backward(*tensors, carrier)


def saved(ctx: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Returns the tensors and the derived object passed to :func:`save`."""
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    if ctx.derived is not None:
        return tensors, ctx.derived
    *tensors_, carrier = tensors
    return tuple(tensors_), carrier.untyped_storage().derived  # type: ignore[attr-defined]
