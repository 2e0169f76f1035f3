"""Receive buffers that are used again: fresh pages cost more than the copy into them."""

from __future__ import annotations

import threading
from bisect import bisect_left

import torch
from torch import Tensor

SMALLEST_BYTES = 64 * 1024
"""Below, the allocator hands out memory it has at hand, and pooling gains nothing."""


def size_class_bytes(size_bytes: int) -> int:
    """The buffer size for ``size_bytes``: a power of two or a quarter step between two.

    So minibatches of nearly one size share buffers, and at most a fifth of a new one is unused (of
    the smallest, more).
    """
    if size_bytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    quarter = 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // quarter) * quarter


class BufferPool:
    """Host memory in size classes; safe to use from several threads.

    The smallest unused buffer that is large enough serves, so where sizes change from minibatch to
    minibatch, the pool soon holds as many of the largest size as are in use at a time, and makes no
    more. It never keeps more unused bytes than were in use at the busiest moment.

    A buffer is handed out again only when nothing else refers to its storage any more: a gradient
    that autograd kept as a view of it, or a tensor that user code stored, stays untouched, and the
    pool lets go of that buffer instead.

    Args:
        pinned: page-locked memory, for copies from and to a CUDA device. It never leaves the
            transport, so nothing else can refer to it.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # by size
        self._in_use_bytes = 0
        self._peak_bytes = 0
        self.in_use = 0
        """Buffers taken and not given back yet."""
        self.made = 0
        """Buffers ever allocated."""
        self.kept = 0
        """Buffers dropped because a tensor outside of the pool still refers to them."""

    @property
    def idle_bytes(self) -> int:
        """Memory waiting to be used again."""
        return sum(buffer.numel() for buffer in self._free)

    def take(self, size_bytes: int) -> Tensor:
        """A buffer of at least ``size_bytes``: uint8 [one of the size classes]."""
        with self._lock:
            buffer = None
            first = bisect_left(self._free, size_bytes, key=Tensor.numel)
            while buffer is None and first < len(self._free):
                buffer = self._free.pop(first)
                if not self._pinned and _references(buffer) > _ALONE:  # of tensors, views, graphs
                    self.kept += 1
                    buffer = None
            if buffer is None:
                self.made += 1
            size = size_class_bytes(size_bytes) if buffer is None else buffer.numel()
            self.in_use += 1
            self._in_use_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """The taker needs it no more (others may, see above)."""
        with self._lock:
            self.in_use -= 1
            self._in_use_bytes -= buffer.numel()
            assert self.in_use >= 0, "a buffer was given back twice"
            self._free.append(buffer)
            self._free.sort(key=Tensor.numel)
            while self.idle_bytes > self._peak_bytes:
                del self._free[0]  # a large one serves for small messages too


def _references(buffer: Tensor) -> int:
    # The count that torch's own pools of buffers (CUDA graph trees) go by. It includes the
    # Python object made here, so only a comparison means something.
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


_ALONE = _references(torch.empty(1, dtype=torch.uint8))
