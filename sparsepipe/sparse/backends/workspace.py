"""Scratch memory that outlives a call."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Workspace(threading.local):
    """One growing byte buffer per thread and name.

    Fresh memory costs a page fault for every 4 KiB touched, which for buffers of some
    megabytes is dearer than the copy into them. CUDA tensors are not kept: its caching
    allocator does that, and knows about streams.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """An uninitialised tensor of ``shape``; valid until ``name`` is next taken."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = shape[0] * shape[1] * like.element_size()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=like.device)
            self._buffers[name] = buffer
        return buffer[:size].view(like.dtype).view(shape)


workspace = _Workspace()
