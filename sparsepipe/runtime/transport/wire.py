"""Packets over a gloo group of two ranks, one direction.

Both sides post all transfers of a packet at once, so that its time is one latency for the
header and one for everything else, however many tensors it has. No wait here has a limit:
gloo cannot cancel a wait without breaking the connection, and an idle channel is no fault.
Limits are kept by those who wait for the channel's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.transport.buffers import SMALLEST_BYTES, BufferPool
from sparsepipe.runtime.transport.codec import (
    BLOCK_BYTES,
    Letters,
    Packet,
    end_block,
    missing_bytes,
    parse,
)
from sparsepipe.runtime.transport.tensors import TensorSpec

_FOREVER = timedelta(days=30)


class Carrier(Protocol):
    """Moves tensors of a CUDA device; see ``cuda.py``. Its calls wait for the device."""

    def send(self, line: Line, tensors: Sequence[Tensor], made: Any) -> None:
        """Sends uint8 tensors that are ready at ``made``; they may be freed afterwards."""

    def receive(self, line: Line, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receives tensors' bytes; any stream may read them afterwards."""


class Line:
    """Sends to and receives from the other rank of a gloo group.

    Args:
        group: two ranks.
        other: the other one's number in the whole.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group = group
        self._other = other

    def send(self, flat: Tensor) -> dist.Work:
        """Begins to send host memory, which must not change before the end."""
        return _begun(dist.isend(flat, dst=self._other, group=self._group))

    def receive(self, flat: Tensor) -> dist.Work:
        """Begins to receive into host memory."""
        return _begun(dist.irecv(flat, src=self._other, group=self._group))


def finish(works: Sequence[dist.Work]) -> None:
    """Waits for transfers.

    Raises:
        RuntimeError: the connection broke.
    """
    for work in works:
        work.wait(_FOREVER)


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A packet as received.

    Attributes:
        mail: its messages.
        buffers: pooled memory that its tensors are made of.
        device_tensors: those on a CUDA device: whoever uses them on a stream must tell
            the allocator (``record_stream``).
    """

    mail: Letters
    buffers: list[Tensor] = field(default_factory=list)
    device_tensors: list[Tensor] = field(default_factory=list)


class Wire:
    """One direction between two ranks.

    Args:
        line: the connection.
        pool: where receive buffers come from.
        carrier: for tensors on a CUDA device, None where there is none.
        device: this rank's.
    """

    def __init__(
        self, line: Line, *, pool: BufferPool, carrier: Carrier | None, device: torch.device
    ) -> None:
        self._line = line
        self._pool = pool
        self._carrier = carrier
        self._device = device
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def send(self, packet: Packet, made: Any) -> None:
        """Returns when the other side has taken everything.

        Args:
            packet: what to send.
            made: event after which its device tensors are ready; None where it has none.
        """
        works = [self._line.send(flat) for flat in (*packet.blocks, *packet.host)]
        if packet.device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            finish(works)  # the other side expects them now: no kernel will spin for it
            self._carrier.send(self._line, packet.device, made)
        else:
            finish(works)

    def send_end(self) -> None:
        """Tells the other side that no more packets will come."""
        finish([self._line.send(end_block())])

    def receive(self) -> Arrival | None:
        """The next packet; None at the end."""
        finish([self._line.receive(self._block)])
        missing = missing_bytes(self._block)
        if missing is None:
            return None
        blocks = [self._block]
        if missing:
            blocks.append(torch.empty(missing, dtype=torch.uint8))
            finish([self._line.receive(blocks[1])])
        header = parse(blocks)
        arrival = Arrival(mail=())
        host = [self._storage(spec.size_bytes, arrival) for spec in header.following("host")]
        sized = zip(host, header.following("host"), strict=True)
        works = [self._line.receive(flat[: spec.size_bytes]) for flat, spec in sized]
        for_device = header.following("device")
        if for_device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            arrival.device_tensors = self._carrier.receive(self._line, for_device)
        finish(works)
        arrival.mail = header.assemble(host, arrival.device_tensors, device=self._device)
        return arrival

    def _storage(self, size_bytes: int, arrival: Arrival) -> Tensor:
        if size_bytes < SMALLEST_BYTES:
            return torch.empty(size_bytes, dtype=torch.uint8)
        buffer = self._pool.take(size_bytes)
        arrival.buffers.append(buffer)
        return buffer


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
