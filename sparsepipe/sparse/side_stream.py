"""A CUDA stream for coordinates and kernel maps, alongside the one on which a network trains."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_copied = WeakIdKeyDictionary()
"""The version of each tensor that was copied on the stream."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of a device, always the same."""
    # First in line: else what is read back waits for the blocks of a kernel that runs.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def copied_beside(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from pinned memory to a CUDA device without waiting for the running step; the
    current stream waits for the copy.
    """
    current, side = torch.cuda.current_stream(device), side_stream(device)
    with torch.cuda.stream(side):
        copy = tensor.to(device, non_blocking=True)
    current.wait_stream(side)
    copy.record_stream(current)
    _copied[copy] = copy._version
    return copy


def was_copied_beside(tensor: Tensor) -> bool:
    """Returns whether :func:`copied_beside` made the tensor, which nothing has changed since."""
    return tensor in _copied and bool(_copied[tensor] == tensor._version)
