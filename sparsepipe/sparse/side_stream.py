"""A CUDA stream for coordinates and kernel maps, beside the one on which a network trains."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device, always the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copied_beside(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a CUDA device, from pinned memory without waiting for the step that runs;
    the current stream waits for the copy.
    """
    current, side = torch.cuda.current_stream(device), side_stream(device)
    with torch.cuda.stream(side):
        copy = tensor.to(device, non_blocking=True)
    current.wait_stream(side)
    copy.record_stream(current)
    copy.is_copied_beside = True  # type: ignore[attr-defined]
    return copy


def was_copied_beside(tensor: Tensor) -> bool:
    """Returns whether :func:`copied_beside` made the tensor."""
    return hasattr(tensor, "is_copied_beside")
