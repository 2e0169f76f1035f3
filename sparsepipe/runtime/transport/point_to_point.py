"""Packets over a gloo group of two ranks, one direction.

Both sides post all transfers of a packet at once, so that its time is one latency for the
header and one for everything else, however many tensors it has. Where packets are alike, tensors
are awaited before their header is read, and there is one latency (``alike.py``). No wait here has
a limit: gloo cannot cancel a wait without breaking the connection, and an idle channel is no
fault. Limits are kept by those who wait for the channel's thread.
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
    Letters,
    Packet,
    TensorSpec,
    end_block,
    missing_bytes,
    parse,
)

Sizes = tuple[int, ...]
"""Bytes of each tensor that follows a header."""

RUNNING = 3
"""Packets of the same sizes running before such are asked for; fewer may be alike by chance."""
MOST_BYTES = 4 * 2**20
"""Of a packet that is asked for. What the other side waits for is written by whoever sends it, as
much at once as a socket takes, and that is the thread that computes; gloo's own writes the rest."""


@dataclass(frozen=True, slots=True)
class How:
    """How the tensors of a packet come; the receiver does as it is told.

    Attributes:
        awaited: they are what is asked for already.
        again: from the next packet on such are asked for beforehand.
    """

    awaited: bool
    again: bool


class RepeatedSizes:
    """Decides at the sending end: sizes that came so often running are asked for from then on."""

    def __init__(self) -> None:
        self._last: Sizes = ()
        self._times = 0
        self._awaited: Sizes = ()

    def next(self, sizes: Sizes, *, repeats: bool) -> How:
        """How the next packet goes.

        Args:
            sizes: of it; empty where nothing follows the header.
            repeats: it is of those that may be alike.
        """
        if not repeats or not 0 < sum(sizes) <= MOST_BYTES:
            return How(awaited=False, again=False)
        if sizes == self._awaited:
            return How(awaited=True, again=True)
        self._times = self._times + 1 if sizes == self._last else 1
        self._last = sizes
        begins = not self._awaited and self._times == RUNNING
        if begins:
            self._awaited = sizes
        return How(awaited=False, again=begins)


_FOREVER = timedelta(days=30)


class _Tag(IntEnum):
    """Of transfers, each kind of which comes in the order in which it was sent."""

    HEADER = 0
    TENSOR = 1
    AWAITED = 2
    """A tensor for which the receiver has posted before it knew the header."""
    DEVICE = 3
    """What a carrier sends: later than the rest of its packet, when the next may have begun."""


def set_transfer_mode(block: Tensor, how: How) -> None:
    """Writes into a header's first block how tensors come."""
    block.numpy()[LENGTH_BYTES] = how.awaited + 2 * how.again


def transfer_mode_of(block: Tensor) -> How:
    """What :func:`set_transfer_mode` has written."""
    word = int(block.numpy()[LENGTH_BYTES])
    return How(awaited=bool(word & 1), again=bool(word & 2))


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

    def send(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        """Begins to send host memory, which must not change before the end."""
        return _begun(dist.isend(flat, dst=self._other, group=self._group, tag=tag))

    def receive(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        """Begins to receive into host memory."""
        return _begun(dist.irecv(flat, src=self._other, group=self._group, tag=tag))


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
        line: the connection, which nobody else uses in this direction.
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
        self._alike = RepeatedSizes()
        self._awaited_bytes: Sizes = ()
        self._awaited: _Tensors | None = None

    def begin(self, packet: Packet, *, repeats: bool = False) -> list[dist.Work]:
        """Begins to send; what is under way, for :meth:`end`.

        Packets go in the order in which they begin; none waits for another to end.

        Args:
            packet: what to send.
            repeats: the next packets may be like this one, as in training.
        """
        sizes = tuple(flat.numel() for flat in packet.host)
        how = self._alike.next(sizes, repeats=repeats and not packet.device)
        set_transfer_mode(packet.blocks[0], how)
        tag = _Tag.AWAITED if how.awaited else _Tag.TENSOR
        works = [self._line.send(block, tag=_Tag.HEADER) for block in packet.blocks]
        return works + [self._line.send(flat, tag=tag) for flat in packet.host]

    def end(self, packet: Packet, works: Sequence[dist.Work], made: Any) -> None:
        """Returns when everything has left this process, and the other side expects it.

        Args:
            packet: that has begun.
            works: what :meth:`begin` returned.
            made: event after which its device tensors are ready; None where it has none.
        """
        finish(works)  # the other side expects device tensors now: no kernel will spin for it
        if packet.device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            self._carrier.send(self._line, packet.device, made)

    def send_end(self) -> None:
        """Tells the other side that no more packets will come."""
        finish([self._line.send(end_block(), tag=_Tag.HEADER)])

    def receive(self) -> Arrival | None:
        """The next packet; None at the end."""
        # Before the header is asked for: once it is, the last may come, and the other side go.
        if self._awaited_bytes and self._awaited is None:
            self._awaited = self._expect(self._awaited_bytes, tag=_Tag.AWAITED)
        finish([self._line.receive(self._block, tag=_Tag.HEADER)])
        missing = missing_bytes(self._block)
        if missing is None:
            self._expect_no_more()
            return None
        how = transfer_mode_of(self._block)
        blocks = [self._block]
        if missing:
            blocks.append(torch.empty(missing, dtype=torch.uint8))
            finish([self._line.receive(blocks[1], tag=_Tag.HEADER)])
        header = parse(blocks)
        sizes = tuple(spec.size_bytes for spec in header.following("host"))
        if how.awaited:
            assert self._awaited is not None
            host, self._awaited = self._awaited, None
        else:
            host = self._expect(sizes, tag=_Tag.TENSOR)
        if how.again:
            self._awaited_bytes = sizes
        arrival = Arrival(mail=(), buffers=host.pooled)
        for_device = header.following("device")
        if for_device:
            assert self._carrier is not None, "a CUDA tensor on a transport for the host"
            arrival.device_tensors = self._carrier.receive(self._line, for_device)
        finish(host.works)
        arrival.mail = header.assemble(host.flat, arrival.device_tensors, device=self._device)
        return arrival

    def _expect_no_more(self) -> None:
        """Nothing comes any more into what was asked for beforehand."""
        for buffer in self._awaited.pooled if self._awaited else ():
            self._pool.give_back(buffer)

    def _expect(self, sizes: Sizes, *, tag: int) -> _Tensors:
        """Begins to receive tensors."""
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
    """Tensors that are being received.

    Attributes:
        flat: uint8 memory of each, in order.
        pooled: those of the pool.
        works: the transfers.
    """

    flat: list[Tensor] = field(default_factory=list)
    pooled: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
