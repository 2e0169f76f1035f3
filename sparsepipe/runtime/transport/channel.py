"""Channels between two ranks over a gloo group, each in one direction, and their two ends.

An end is a thread, so that transfers go on while the worker computes.

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

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.transport.buffer_pool import SMALLEST_BYTES, BufferPool
from sparsepipe.runtime.transport.messages import Route
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
from sparsepipe.schedule.communication import INBOX_DEPTH

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


_Item = TypeVar("_Item")


class Ended(Exception):
    """Nothing more will come out of a queue."""


class BoundedQueue(Generic[_Item]):
    """First in, first out, for one producer and one consumer.

    Unlike ``queue.Queue``, every wait ends at once when the queue fails, and raises that error.

    Args:
        depth: items it holds; a producer waits for room.
    """

    def __init__(self, depth: int) -> None:
        assert depth >= 1
        self._depth = depth
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._discards = False
        self._error: Exception | None = None
        self.discarded = 0
        """Items that came, or were waiting, after the consumer left."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Adds an item; see :meth:`wait_for_room`."""
        self.wait_for_room(limit_s=limit_s, room=room)
        with self._changed:
            if self._discards:
                self.discarded += 1
            else:
                self._items.append(item)
            self._changed.notify_all()

    def wait_for_room(self, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Returns when the producer can put an item without waiting.

        Args:
            limit_s: of the wait; None: as long as it takes.
            room: items that it holds for this producer, at most ``depth``.

        Raises:
            TimeoutError: there was no room within ``limit_s``.
        """
        depth = self._depth if room is None else min(room, self._depth)
        with self._changed:
            self._wait(lambda: self._discards or len(self._items) < depth, limit_s)
            assert not self._ended, "the producer has ended this queue"

    def get(self, *, limit_s: float | None = None) -> _Item:
        """Takes the oldest item.

        Raises:
            TimeoutError: none came within ``limit_s``.
            Ended: none will come.
        """
        with self._changed:
            self._wait(lambda: bool(self._items) or self._ended, limit_s)
            if not self._items:
                raise Ended
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[_Item]:
        """Takes items as they come, until the end."""
        while True:
            try:
                item = self.get()
            except Ended:
                return
            yield item
            del item  # what a consumer has done with is not kept alive here

    def end(self) -> None:
        """The producer will put no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard(self) -> None:
        """The consumer will get no more: what waits, and what still comes, is dropped."""
        with self._changed:
            self._discards = True
            self.discarded += len(self._items)
            self._items.clear()
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Makes every wait, now and later, raise ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], limit_s: float | None) -> None:
        met = self._changed.wait_for(lambda: self._error is not None or ready(), limit_s)
        if self._error is not None:
            raise self._error
        if not met:
            raise TimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFault:
    """The error that ended a channel.

    Attributes:
        minibatch: the one under way; None where its thread waited for the next.
    """

    route: Route
    minibatch: int | None
    error: Exception


class ChannelFailed(Exception):
    """Raised in every wait on a queue of a channel that has failed."""

    def __init__(self, fault: ChannelFault) -> None:
        super().__init__(fault)
        self.fault = fault


class TensorChanged(Exception):
    """A tensor was written to between ``send`` and its transfer."""


_Report = Callable[[ChannelFault], None]


class Outgoing:
    """The sending end.

    Args:
        depth: packets it takes before :meth:`put` waits, beside the first one in transfer.
        usual: the same where senders are held back.
        report: called with what ended it, from the thread or in :meth:`put`.
    """

    def __init__(
        self, route: Route, wire: Wire, *, depth: int, usual: int, report: _Report
    ) -> None:
        self.route = route
        self._usual = usual
        self.queue: BoundedQueue[tuple[Packet, Sequence[dist.Work], Any]] = BoundedQueue(depth)
        self._wire = wire
        self._report = report
        self.thread = _start(self._run, route, "out")

    def put(self, packet: Packet, *, made: Any, held_back: bool, limit_s: float) -> None:
        """Begins to send a packet, in the caller's thread: another one would have to wake up.

        ``made`` is the event after which its device tensors are ready. With ``held_back`` no more
        than usual may be under way, and packets do not repeat.

        Raises:
            TimeoutError: there was no room within ``limit_s``.
            ChannelFailed: the connection is broken.
        """
        self.queue.wait_for_room(limit_s=limit_s, room=self._usual if held_back else None)
        try:
            works = self._wire.begin(packet, repeats=not held_back)
        except Exception as error:
            fault = ChannelFault(route=self.route, minibatch=packet.minibatch, error=error)
            self._report(fault)
            self.queue.wait_for_room()  # raises what was reported first
        self.queue.put((packet, works, made))

    def _run(self) -> None:
        minibatch = None
        try:
            for packet, works, made in self.queue:
                minibatch = packet.minibatch
                self._wire.end(packet, works, made)
                if packet.changed():
                    raise TensorChanged
                minibatch = None
                del packet, works, made  # the tensors are free before the next ones come
            self._wire.send_end()
        except Exception as error:
            self._report(ChannelFault(route=self.route, minibatch=minibatch, error=error))


class Incoming:
    """The receiving end."""

    def __init__(self, route: Route, wire: Wire, *, report: _Report) -> None:
        self.route = route
        self.queue: BoundedQueue[Arrival] = BoundedQueue(INBOX_DEPTH)
        self._wire = wire
        self._report = report
        self.thread = _start(self._run, route, "in")

    def _run(self) -> None:
        try:
            while True:
                self.queue.wait_for_room()
                arrival = self._wire.receive()
                if arrival is None:
                    break
                self.queue.put(arrival)
                del arrival
            self.queue.end()
        except Exception as error:
            self._report(ChannelFault(route=self.route, minibatch=None, error=error))


def _start(run: Callable[[], None], route: Route, end: str) -> threading.Thread:
    # A daemon: a wait that never ends must not keep the process.
    name = f"{route.kind.value}-{route.source}-{route.target}-{end}"
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
