"""What a rank's channels run on: groups of two ranks, made by all ranks in one order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sparsepipe.runtime.meeting import new_group
from sparsepipe.runtime.transport import cuda
from sparsepipe.runtime.transport.buffers import BufferPool
from sparsepipe.runtime.transport.message import Kind
from sparsepipe.runtime.transport.routes import Route
from sparsepipe.runtime.transport.wire import Carrier, Line, Wire


class Connections:
    """Makes wires, and closes what they run on.

    Two ranks have one connection by gloo, whatever they send to each other: each of them takes a
    thread that wakes up a hundred times a second, and disturbs what computes.

    Args:
        rank: this one.
        device: where its tensors are.
        direct: tensors of a device go by NCCL.
        pool: where receive buffers come from.
        timeout_s: limit for each connection.
    """

    def __init__(
        self, rank: int, *, device: torch.device, direct: bool, pool: BufferPool, timeout_s: float
    ) -> None:
        self._rank = rank
        self._device = device
        self._direct = direct
        self._pool = pool
        self._pinned = BufferPool(pinned=True)
        self._timeout_s = timeout_s
        self._pairs: dict[frozenset[int], dist.ProcessGroup] = {}
        self._own: list[dist.ProcessGroup] = []

    def wire(self, route: Route) -> Wire | None:
        """This rank's end of a channel, if it has one; every rank must call it, in the same order.

        Raises:
            TransportError: a rank did not come in time.
        """
        ranks = [route.source, route.target]
        pair = frozenset(ranks)
        if pair not in self._pairs:
            self._pairs[pair] = self._group(ranks, "gloo")
        # Of one communicator of NCCL's, sends and receives could wait for each other.
        nccl = self._group(ranks, "nccl") if self._direct else None
        if self._rank not in pair:
            return None
        other = route.other(self._rank)
        carrier: Carrier | None = None
        if nccl is not None:
            carrier = direct = cuda.Direct(self._device, nccl=nccl, other=other)
            direct.connect(sending=self._rank == route.source)
        elif self._device.type == "cuda":
            carrier = cuda.HostStaged(self._device, pool=self._pinned)
        line = Line(self._pairs[pair], other, number=list(Kind).index(route.kind))
        return Wire(line, pool=self._pool, carrier=carrier, device=self._device)

    def close(self) -> None:
        """Ends the connections, on which nothing is under way any more."""
        for group in self._own:
            dist.destroy_process_group(group)

    def _group(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = new_group(ranks, backend=backend, timeout_s=self._timeout_s)
        if self._rank in ranks:
            self._own.append(group)
        return group
