"""Channels between two ranks over a gloo group, each in one direction, and their two ends.

Each end is a thread, so that transfers go on while the worker computes. Its waits have no limit:
gloo cannot cancel a wait without breaking the connection, and an idle channel is not a fault.
Callers that wait for the thread have limits.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import IntEnum, IntFlag
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.transport.serialization import (
    BLOCK_BYTES,
    LENGTH_BYTES,
    Messages,
    Packet,
    Route,
    TensorSpec,
    missing_bytes,
    parse,
)
from sparsepipe.schedule.communication import INBOX_DEPTH

Sizes = tuple[int, ...]
"""Size in bytes of each tensor that follows a header."""

RUNNING = 3
"""Number of equally large packets in a row after which receives are posted; fewer may be chance."""
MOST_BYTES = 4 * 2**20
"""Largest packet, in bytes, whose receives are posted beforehand."""
_FOREVER = timedelta(days=30)


class _Tag(IntEnum):
    """Kinds of transfers; those of one kind arrive in the order in which they were sent."""

    HEADER = 0
    TENSOR = 1
    POSTED = 2
    """A tensor whose receive was posted before the header was read."""
    DEVICE = 3
    """A tensor that a carrier sends after its packet's others; the next packet may have begun."""


class TransferMode(IntFlag):
    """How the tensors of a packet are received, written in its header."""

    POSTED = 1
    """Receives were posted beforehand."""
    AGAIN = 2
    """Receives of the same sizes are posted before each following packet."""


@dataclass(slots=True)
class RepeatedSizes:
    """Decides, at the sending end, for which packets receives are posted beforehand.

    A packet takes one latency for the header and one for all of its tensors, but only one where
    packets repeat their sizes, as in training on plain tensors: the receiver posts the receives of
    the next packet's tensors before it reads the header. A posted receive cannot be withdrawn: it
    keeps its memory until a packet of these sizes comes, and no other sizes are posted beforehand.
    """

    _last: Sizes = ()
    _times: int = 0
    _posted: Sizes = ()

    def next(self, sizes: Sizes, *, repeats: bool) -> TransferMode:
        """How a packet of ``sizes`` is received; ``repeats``: whether others like it may follow."""
        if not repeats or not 0 < sum(sizes) <= MOST_BYTES:
            return TransferMode(0)
        if sizes == self._posted:
            return TransferMode.POSTED | TransferMode.AGAIN
        self._times = self._times + 1 if sizes == self._last else 1
        self._last = sizes
        if self._posted or self._times != RUNNING:
            return TransferMode(0)
        self._posted = sizes
        return TransferMode.AGAIN


SMALLEST_BYTES = 64 * 1024
"""Smallest pooled buffer: below this size the allocator itself reuses memory as fast."""


class BufferPool:
    """Receive buffers that are reused: fresh pages cost more than the copy into them.

    A request gets the smallest unused buffer that is large enough. The pool never keeps more unused
    bytes than were once in use at a time. A buffer whose storage something else still refers to,
    such as a gradient that autograd kept as a view of it, is not reused but dropped.

    ``pinned`` memory is page-locked, for copies from and to a CUDA device. It never leaves the
    transport, so nothing else can refer to it.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # by size
        self._in_use_bytes = 0
        self._peak_bytes = 0
        self.in_use = 0
        """Number of buffers taken and not given back yet."""
        self.made = 0
        """Number of buffers ever allocated."""
        self.kept = 0
        """Number of buffers dropped because a tensor outside of the pool still refers to them."""

    def take(self, size_bytes: int) -> Tensor:
        """A uint8 buffer of at least ``size_bytes``; sizes are powers of two and quarters between.

        So minibatches of similar sizes share buffers. A new one above 64 KiB is at least 4/5 used.
        """
        with self._lock:
            buffer = None
            first = bisect_left(self._free, size_bytes, key=Tensor.numel)
            while buffer is None and first < len(self._free):
                buffer = self._free.pop(first)
                if not self._pinned and _references(buffer) > _ALONE:  # of tensors, views, graphs
                    self.kept += 1
                    buffer = None
            size = SMALLEST_BYTES if buffer is None else buffer.numel()
            if buffer is None:
                self.made += 1
                if size_bytes > SMALLEST_BYTES:
                    quarter = 1 << ((size_bytes - 1).bit_length() - 3)
                    size = -(-size_bytes // quarter) * quarter
            self.in_use += 1
            self._in_use_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool; tensors outside of it may still refer to the buffer."""
        with self._lock:
            self.in_use -= 1
            self._in_use_bytes -= buffer.numel()
            assert self.in_use >= 0, "a buffer was given back twice"
            self._free.append(buffer)
            self._free.sort(key=Tensor.numel)
            while sum(map(Tensor.numel, self._free)) > self._peak_bytes:
                del self._free[0]  # a large one serves for small messages too


def _references(buffer: Tensor) -> int:
    # torch's own pools of buffers (CUDA graph trees) use this count. It includes the Python object
    # made here, so only comparisons are meaningful.
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


_ALONE = _references(torch.empty(1, dtype=torch.uint8))


class Carrier(Protocol):
    """Moves tensors of a CUDA device; see ``cuda.py``. Its calls wait for the device."""

    def send(self, line: Line, tensors: Sequence[Tensor], made: Any) -> None:
        """Sends uint8 tensors that are ready after event ``made``; they may be freed afterwards."""

    def receive(self, line: Line, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receives a uint8 tensor for each of ``specs``; any stream may read them afterwards."""


@dataclass(frozen=True, slots=True)
class Line:
    """Sends to and receives from the other rank of a gloo group of two."""

    group: dist.ProcessGroup
    other: int

    def send(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        work = dist.isend(flat, dst=self.other, group=self.group, tag=tag)
        assert work is not None, "this rank is not in the group"
        return work

    def receive(self, flat: Tensor, *, tag: int = _Tag.DEVICE) -> dist.Work:
        work = dist.irecv(flat, src=self.other, group=self.group, tag=tag)
        assert work is not None, "this rank is not in the group"
        return work


def finish(works: Sequence[dist.Work]) -> None:
    """Waits for the end of transfers."""
    for work in works:
        work.wait(_FOREVER)


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A packet as received.

    Attributes:
        buffers: pooled memory in which its larger host tensors lie.
        device_tensors: its tensors on a CUDA device; users on other streams must ``record_stream``.
    """

    messages: Messages
    buffers: list[Tensor]
    device_tensors: list[Tensor]


@dataclass(slots=True, eq=False)
class Wire:
    """One direction between two ranks; ``carrier``, if any, moves tensors on a CUDA device."""

    line: Line
    _: KW_ONLY
    pool: BufferPool
    carrier: Carrier | None
    device: torch.device
    _block: Tensor = field(default_factory=lambda: torch.empty(BLOCK_BYTES, dtype=torch.uint8))
    _repeated: RepeatedSizes = field(default_factory=RepeatedSizes)
    _repeated_bytes: Sizes = ()
    _posted: _Tensors | None = None

    def begin(self, packet: Packet, *, repeats: bool = False) -> list[dist.Work]:
        """Begins to send a packet; returns the transfers under way, for :meth:`end`.

        Packets leave in the order of these calls. ``repeats``: whether others like it may follow.
        """
        sizes = tuple(flat.numel() for flat in packet.host)
        mode = self._repeated.next(sizes, repeats=repeats and not packet.device)
        packet.blocks[0].numpy()[LENGTH_BYTES] = mode
        tag = _Tag.POSTED if TransferMode.POSTED in mode else _Tag.TENSOR
        works = [self.line.send(block, tag=_Tag.HEADER) for block in packet.blocks]
        return works + [self.line.send(flat, tag=tag) for flat in packet.host]

    def end(self, packet: Packet, works: Sequence[dist.Work], made: Any) -> None:
        """Sends device tensors, which are ready at event ``made``, and waits for all transfers."""
        finish(works)  # the other side now expects device tensors: no kernel will spin
        if packet.device:
            assert self.carrier is not None, "a CUDA tensor on a transport for the host"
            self.carrier.send(self.line, packet.device, made)

    def receive(self) -> Arrival | None:
        """Receives the next packet; None once the sender has ended."""
        # Before the header's receive is posted: after that the last packet may arrive and the other
        # side leave.
        if self._repeated_bytes and self._posted is None:
            self._posted = self._post(self._repeated_bytes, tag=_Tag.POSTED)
        finish([self.line.receive(self._block, tag=_Tag.HEADER)])
        missing = missing_bytes(self._block)
        if missing is None:
            for buffer in self._posted.pooled if self._posted else ():  # nothing will arrive in it
                self.pool.give_back(buffer)
            return None
        mode = TransferMode(int(self._block.numpy()[LENGTH_BYTES]))
        blocks = [self._block]
        if missing:
            blocks.append(torch.empty(missing, dtype=torch.uint8))
            finish([self.line.receive(blocks[1], tag=_Tag.HEADER)])
        header = parse(blocks)
        sizes = tuple(spec.size_bytes for spec in header.following("host"))
        if TransferMode.POSTED in mode:
            assert self._posted is not None
            host, self._posted = self._posted, None
        else:
            host = self._post(sizes, tag=_Tag.TENSOR)
        if TransferMode.AGAIN in mode:
            self._repeated_bytes = sizes
        on_device: list[Tensor] = []
        if for_device := header.following("device"):
            assert self.carrier is not None, "a CUDA tensor on a transport for the host"
            on_device = self.carrier.receive(self.line, for_device)
        finish(host.works)
        messages = header.assemble(host.flat, on_device, device=self.device)
        return Arrival(messages=messages, buffers=host.pooled, device_tensors=on_device)

    def _post(self, sizes: Sizes, *, tag: int) -> _Tensors:
        found = _Tensors()
        for size in sizes:
            flat = torch.empty(size, dtype=torch.uint8) if size < SMALLEST_BYTES else None
            if flat is None:
                flat = self.pool.take(size)
                found.pooled.append(flat)
            found.flat.append(flat)
            found.works.append(self.line.receive(flat[:size], tag=tag))
        return found


@dataclass(slots=True)
class _Tensors:
    """Tensors being received: the uint8 memory of each, the memory from the pool, transfers."""

    flat: list[Tensor] = field(default_factory=list)
    pooled: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


_Item = TypeVar("_Item")


class Ended(Exception):
    """Raised when a queue is empty and its producer has ended it."""


class BoundedQueue(Generic[_Item]):
    """A first-in, first-out queue for one producer, which waits for room, and one consumer.

    After :meth:`fail`, every wait raises the error at once, which ``queue.Queue`` cannot do.
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
        """Number of items that were dropped because the consumer had left."""

    def put(self, item: _Item, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Waits for room, as :meth:`wait_for_room` does, and adds an item."""
        self.wait_for_room(limit_s=limit_s, room=room)
        with self._changed:
            if self._discards:
                self.discarded += 1
            else:
                self._items.append(item)
            self._changed.notify_all()

    def wait_for_room(self, *, limit_s: float | None = None, room: int | None = None) -> None:
        """Waits until fewer items than ``room`` or the depth are left, at most for ``limit_s``."""
        depth = self._depth if room is None else min(room, self._depth)
        with self._changed:
            self._wait(lambda: self._discards or len(self._items) < depth, limit_s)
            assert not self._ended, "the producer has ended this queue"

    def get(self, *, limit_s: float | None = None) -> _Item:
        """Takes the oldest item; raises TimeoutError after ``limit_s``, Ended if none will come."""
        with self._changed:
            self._wait(lambda: bool(self._items) or self._ended, limit_s)
            if not self._items:
                raise Ended
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[_Item]:
        """Takes and yields items as they come, until the producer ends the queue."""
        while True:
            try:
                item = self.get()
            except Ended:
                return
            yield item
            del item  # an item that the consumer is done with is not kept alive here

    def end(self) -> None:
        """Ends the queue: the producer will put no more items."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Drops items that wait or still come: the consumer will get no more."""
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


@dataclass(eq=False)
class ChannelFailed(Exception):
    """Raised in every wait of a rank once ``error`` ended a channel, in ``minibatch`` if known."""

    route: Route
    minibatch: int | None
    error: Exception


class TensorChanged(Exception):
    """Raised for a tensor that was written to between ``send`` and its transfer."""


_Report = Callable[[ChannelFailed], None]


def _started(run: Callable[[], None], route: Route, end: str) -> threading.Thread:
    """Starts the thread of a channel's end: a daemon, so that no wait keeps the process alive."""
    name = f"{route.kind.value}-{route.source}-{route.target}-{end}"
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Outgoing:
    """The sending end of a channel: a thread, which reports an error that ends it early.

    Args:
        depth: number of packets, besides one in transfer, that may wait before :meth:`put` does.
        usual: the same for packets that are put with ``held_back``.
        report: called with the error, in the thread or in :meth:`put`.
    """

    def __init__(
        self, route: Route, wire: Wire, *, depth: int, usual: int, report: _Report
    ) -> None:
        self.route, self._wire, self._report, self._usual = route, wire, report, usual
        self.queue: BoundedQueue[tuple[Packet, Sequence[dist.Work], Any]] = BoundedQueue(depth)
        self.thread = _started(self._run, route, "out")

    def put(self, packet: Packet, *, made: Any, held_back: bool, limit_s: float) -> None:
        """Begins to send a packet, in the caller's thread, since another would have to wake up.

        ``made``: event after which its device tensors are ready. With ``held_back``, waits while
        ``usual`` packets are waiting, and no receives are posted beforehand.
        """
        self.queue.wait_for_room(limit_s=limit_s, room=self._usual if held_back else None)
        try:
            works = self._wire.begin(packet, repeats=not held_back)
        except Exception as error:
            self._report(ChannelFailed(self.route, packet.minibatch, error))
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
            # An empty header, after which no more packets come.
            empty = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
            finish([self._wire.line.send(empty, tag=_Tag.HEADER)])
        except Exception as error:
            self._report(ChannelFailed(self.route, minibatch, error))


class Incoming:
    """The receiving end of a channel: a thread, which reports an error that ends it early."""

    def __init__(self, route: Route, wire: Wire, *, report: _Report) -> None:
        self.route, self._wire, self._report = route, wire, report
        self.queue: BoundedQueue[Arrival] = BoundedQueue(INBOX_DEPTH)
        self.thread = _started(self._run, route, "in")

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
            self._report(ChannelFailed(self.route, None, error))
