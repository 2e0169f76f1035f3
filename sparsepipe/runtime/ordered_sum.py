"""Sums over ranks that do not depend on how many elements there are, or on the network.

An ``all_reduce`` adds in a ring: which rank's addend comes first differs from element to
element, and float32 sums of three or more differ with it. Here each rank adds one part of
the elements in the order of the ranks and hands it to the others, which moves the same
number of bytes as a ring, 2 (n - 1) / n of the vector a rank, and gives all of them the bits
that one process would get.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class OrderedSum:
    """A vector that is summed over a group's ranks, in their order.

    Args:
        group: all ranks of which call :meth:`reduce`.
        length: number of elements.
        dtype: of the elements, and of the sums.
        device: where :attr:`values` lie; gloo is given host memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        ranks = dist.get_world_size(group)
        staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
        part = -(-length // ranks)
        sent = torch.zeros(ranks * part, dtype=dtype, device=device)
        self._sent = sent
        self._wire = torch.empty_like(sent, device="cpu", pin_memory=True) if staged else sent
        self._parts = torch.empty_like(self._wire)
        self.values = sent[:length]

    def reduce(self) -> None:
        """Replaces :attr:`values` by their sum; a collective."""
        if self._wire is not self._sent:
            self._wire.copy_(self._sent)
        dist.all_to_all_single(self._parts, self._wire, group=self._group)
        first, *others = self._parts.chunk(dist.get_world_size(self._group))
        for other in others:
            first += other
        # Not by an all_gather, over which gloo took longer for the same bytes (2 ranks, loopback).
        for other in others:
            other.copy_(first)
        dist.all_to_all_single(self._wire, self._parts, group=self._group)
        if self._wire is not self._sent:
            self._sent.copy_(self._wire)
