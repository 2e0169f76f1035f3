"""Sums over ranks in a fixed order, whatever the number of elements and the network.

An ``all_reduce`` adds in a ring: which rank's addend comes first differs from element to
element, and float32 sums of three or more differ with it. Here elements are added in the order
of the ranks, in one of two ways (``sparsepipe.schedule.communication``), and all ranks get the bits
that one process would get.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.collectives.chain_sum import ChainSum
from sparsepipe.schedule.communication import Way, way_of


class OrderedSum:
    """A vector that is summed over a group's ranks, in their order.

    Where it lies on a CUDA device, a group over gloo sums a copy in pinned host memory, in either
    way; one over NCCL sums on the devices, and directly, whatever ``way`` says.

    Args:
        device: where :attr:`values` lie; gloo is given host memory.
        way: how; None: as is best for the ranks' hosts and the length.
        chunk: elements that go through a chain together; None: as many as make a good size.
        room: partial sums that may lie at a rank of a chain; None: as many as are of use.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        way: Way | None = None,
        chunk: int | None = None,
        room: int | None = None,
    ) -> None:
        self._group = group
        self._way = way
        self._chunk, self._room = chunk, room
        self._over_gloo = dist.get_backend(group) == "gloo"
        staged = device.type == "cuda" and self._over_gloo
        ranks = dist.get_world_size(group)
        part = -(-length // ranks)
        sent = torch.zeros(ranks * part, dtype=dtype, device=device)
        self._sent = sent
        self._wire = torch.empty_like(sent, device="cpu", pin_memory=True) if staged else sent
        self._sum: Callable[[], None] | None = None
        self.values = sent[:length]

    def reduce(self) -> None:
        """Replaces :attr:`values` by their sum; a collective."""
        if self._wire is not self._sent:
            self._wire.copy_(self._sent)
        if self._sum is None:
            self._sum = self._choose()
        self._sum()
        if self._wire is not self._sent:
            self._sent.copy_(self._wire)

    def _choose(self) -> Callable[[], None]:
        """The function that sums; chosen at the first sum, in which all ranks take part."""
        ranks = dist.get_world_size(self._group)
        # NCCL would need sends and receives in one call: those of one communicator that are begun
        # one by one go one after another, and ranks that begin them in unlike order wait for ever.
        if ranks > 1 and self._over_gloo:
            vector = self._wire[: len(self.values)]
            way = self._way or way_of(_hosts(self._group), vector.nbytes)
            if way == "chain":
                return ChainSum(self._group, vector, chunk=self._chunk, room=self._room).run
        return _Direct(self._group, self._wire).run


class _Direct:
    """Each rank adds one part and hands it to the others.

    That moves the same number of bytes as a ring, 2 (n - 1) / n of the vector a rank. The vector
    has parts of equal size, one for each rank.
    """

    def __init__(self, group: dist.ProcessGroup, vector: Tensor) -> None:
        self._group, self._vector = group, vector
        self._parts = torch.empty_like(vector)

    def run(self) -> None:
        dist.all_to_all_single(self._parts, self._vector, group=self._group)
        first, *others = self._parts.chunk(dist.get_world_size(self._group))
        for other in others:
            first += other
        # Not by an all_gather, over which gloo took longer for the same bytes (2 ranks, loopback).
        for other in others:
            other.copy_(first)
        dist.all_to_all_single(self._vector, self._parts, group=self._group)


def _hosts(group: dist.ProcessGroup) -> list[int]:
    """The host of each rank, as a number; a collective."""
    mine = torch.tensor([_host_number()], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [int(number) for number in found]


def _host_number() -> int:
    """The same in all processes between which no link lies: of one machine and network."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = f"{machine} {os.stat('/proc/thread-self/ns/net').st_ino}"
    except OSError:  # not Linux
        text = socket.gethostname()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
