"""Packets between two ranks over a gloo group, in one direction.

Both sides post all transfers of a packet at once, so that it takes one latency for the header and
one for everything else, however many tensors it has.

Where packets repeat their sizes, there is one latency: the receiver posts the tensors of the next
packet before it has read the header. Otherwise they wait at the sender until a thread over there
has woken up, which lasts as long as other threads keep the cores busy. In training on plain tensors
most packets of a channel repeat; those of sparse tensors, whose sizes differ, and of batches that
are cut into unlike microbatches do not. A posted receive cannot be taken back: it takes up its
memory until packets of these sizes come, and nothing else is posted beforehand.

No wait here has a limit: gloo cannot cancel a wait without breaking the connection, and an idle
channel is not a fault. Limits are kept by those who wait for the channel's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.transport.buffer_pool import SMALLEST_BYTES, BufferPool
from sparsepipe.runtime.transport.serialization import (
    BLOCK_BYTES,
    LENGTH_BYTES,
    Messages,
    Packet,
    TensorSpec,
    end_block,
    missing_bytes,
    parse,
)

Sizes = tuple[int, ...]
"""Bytes of each tensor that follows a header."""

RUNNING = 3
"""Packets of the same sizes in a row before such are posted beforehand; fewer may be chance."""
MOST_BYTES = 4 * 2**20
"""Most bytes of a packet that is posted beforehand. The thread that computes writes what the other
side has posted, as much at once as a socket takes; gloo's own thread writes the rest."""
_FOREVER = timedelta(days=30)


class _Tag(IntEnum):
    """Kinds of transfers, each of which arrives in the order in which it was sent."""

    HEADER = 0
    TENSOR = 1
    POSTED = 2
    """A tensor for which the receiver has posted before it knew the header."""
    DEVICE = 3
    """A tensor sent by a carrier: after the rest of its packet, when the next may have begun."""


@dataclass(frozen=True, slots=True)
class TransferMode:
    """How the tensors of a packet are received, written in its header.

    Attributes:
        posted: they were posted beforehand.
        again: from the next packet on such are posted beforehand.
    """

    posted: bool
    again: bool

    def write(self, block: Tensor) -> None:
        block.numpy()[LENGTH_BYTES] = self.posted + 2 * self.again

    @classmethod
    def read(cls, block: Tensor) -> TransferMode:
        bits = int(block.numpy()[LENGTH_BYTES])
        return cls(posted=bool(bits & 1), again=bool(bits & 2))


class RepeatedSizes:
    """Decides at the sending end which packets are posted beforehand."""

    def __init__(self) -> None:
        self._last: Sizes = ()
        self._times = 0
        self._posted: Sizes = ()

    def next(self, sizes: Sizes, *, repeats: bool) -> TransferMode:
        """How the next packet is received; ``sizes`` is empty where nothing follows the header."""
        if not repeats or not 0 < sum(sizes) <= MOST_BYTES:
            return TransferMode(posted=False, again=False)
        if sizes == self._posted:
            return TransferMode(posted=True, again=True)
        self._times = self._times + 1 if sizes == self._last else 1
        self._last = sizes
        begins = not self._posted and self._times == RUNNING
        if begins:
            self._posted = sizes
        return TransferMode(posted=False, again=begins)


class Carrier(Protocol):
    """Moves tensors of a CUDA device; see ``cuda.py``. Its calls wait for the device."""

    def send(self, line: Line, tensors: Sequence[Tensor], made: Any) -> None:
        """Sends uint8 tensors that are ready at ``made``; they may be freed afterwards."""

    def receive(self, line: Line, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receives tensors' bytes; any stream may read them afterwards."""


class Line:
    """Sends to and receives from the other rank of a gloo group of two."""

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group = group
        self._other = other

    def send(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        return _begun(dist.isend(flat, dst=self._other, group=self._group, tag=tag))

    def receive(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        return _begun(dist.irecv(flat, src=self._other, group=self._group, tag=tag))


def finish(works: Sequence[dist.Work]) -> None:
    """Waits for transfers."""
    for work in works:
        work.wait(_FOREVER)


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A packet as received.

    Attributes:
        buffers: pooled memory that its tensors are made of.
        device_tensors: those on a CUDA device; users on another stream must ``record_stream``.
    """

    messages: Messages
    buffers: list[Tensor] = field(default_factory=list)
    device_tensors: list[Tensor] = field(default_factory=list)


class Wire:
    """One direction between two ranks.

    Args:
        line: the connection, used in this direction by this wire only.
        carrier: for tensors on a CUDA device; None without one.
    """

    def __init__(
        self, line: Line, *, pool: BufferPool, carrier: Carrier | None, device: torch.device
    ) -> None:
        self._line = line
        self._pool = pool
        self._carrier = carrier
        self._device = device
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._repeated = RepeatedSizes()
        self._repeated_bytes: Sizes = ()
        self._posted: _Tensors | None = None

    def begin(self, packet: Packet, *, repeats: bool = False) -> list[dist.Work]:
        """Begins to send; returns the transfers under way, for :meth:`end`.

        Packets go in the order in which they begin; none waits for another to end.
        """
        sizes = tuple(flat.numel() for flat in packet.host)
        mode = self._repeated.next(sizes, repeats=repeats and not packet.device)
        mode.write(packet.blocks[0])
        tag = _Tag.POSTED if mode.posted else _Tag.TENSOR
        works = [self._line.send(block, tag=_Tag.HEADER) for block in packet.blocks]
        return works + [self._line.send(flat, tag=tag) for flat in packet.host]

    def end(self, packet: Packet, works: Sequence[dist.Work], made: Any) -> None:
        """Returns when everything has left this process, and the other side expects it."""
        finish(works)  # the other side expects device tensors now: no kernel will spin for it
        if packet.device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            self._carrier.send(self._line, packet.device, made)

    def send_end(self) -> None:
        """Tells the other side that no more packets will come."""
        finish([self._line.send(end_block(), tag=_Tag.HEADER)])

    def receive(self) -> Arrival | None:
        """The next packet; None at the end."""
        # Before the header's receive is posted: after it the last packet may arrive and the other
        # side leave.
        if self._repeated_bytes and self._posted is None:
            self._posted = self._post(self._repeated_bytes, tag=_Tag.POSTED)
        finish([self._line.receive(self._block, tag=_Tag.HEADER)])
        missing = missing_bytes(self._block)
        if missing is None:
            for buffer in self._posted.pooled if self._posted else ():  # nothing comes into it
                self._pool.give_back(buffer)
            return None
        mode = TransferMode.read(self._block)
        blocks = [self._block]
        if missing:
            blocks.append(torch.empty(missing, dtype=torch.uint8))
            finish([self._line.receive(blocks[1], tag=_Tag.HEADER)])
        header = parse(blocks)
        sizes = tuple(spec.size_bytes for spec in header.following("host"))
        if mode.posted:
            assert self._posted is not None
            host, self._posted = self._posted, None
        else:
            host = self._post(sizes, tag=_Tag.TENSOR)
        if mode.again:
            self._repeated_bytes = sizes
        arrival = Arrival(messages=(), buffers=host.pooled)
        for_device = header.following("device")
        if for_device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            arrival.device_tensors = self._carrier.receive(self._line, for_device)
        finish(host.works)
        arrival.messages = header.assemble(host.flat, arrival.device_tensors, device=self._device)
        return arrival

    def _post(self, sizes: Sizes, *, tag: int) -> _Tensors:
        found = _Tensors()
        for size in sizes:
            flat = torch.empty(size, dtype=torch.uint8) if size < SMALLEST_BYTES else None
            if flat is None:
                flat = self._pool.take(size)
                found.pooled.append(flat)
            found.flat.append(flat)
            found.works.append(self._line.receive(flat[:size], tag=tag))
        return found


@dataclass(slots=True)
class _Tensors:
    """Tensors that are being received: uint8 memory of each, those of the pool, transfers."""

    flat: list[Tensor] = field(default_factory=list)
    pooled: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
