"""The two ends of a channel: a thread each, so that transfers go on while the worker computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from sparsepipe.runtime.transport.messages import Route
from sparsepipe.runtime.transport.point_to_point import Arrival, Wire
from sparsepipe.runtime.transport.serialization import Packet
from sparsepipe.schedule.communication import INBOX_DEPTH

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
