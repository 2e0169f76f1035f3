"""The lines in which messages wait between two ranks, one for each direction's cargo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.links import Sends

Part: TypeAlias = tuple[int, int | None]
"""Number of the minibatch, and of its microbatch if it has some."""

Arrived: TypeAlias = Callable[[Part, float, float], None]
"""Told of each message that has come: which, when it began its way, and when that ended."""


class Line:
    """Messages of one cargo from one rank to another, one on its way at a time.

    Args:
        events: in which they arrive.
        flows: that carry them.
        sends: what may wait where.
        ports: between the two ranks.
        latency_s: the same.
        num_bytes: of each message.
        arrived: see :data:`Arrived`.
        wake_source: called when its sender may have room.
        wake_target: called when its receiver may have what it waits for.
    """

    __slots__ = (
        "_arrived",
        "_bytes",
        "_events",
        "_flows",
        "_latency_s",
        "_moving",
        "_ports",
        "_sends",
        "_there",
        "_waiting",
        "_wake_source",
        "_wake_target",
        "_wanted",
    )

    def __init__(
        self,
        events: Events,
        flows: Flows,
        sends: Sends,
        *,
        ports: tuple[int, ...],
        latency_s: float,
        num_bytes: float,
        arrived: Arrived,
        wake_source: Callable[[], None],
        wake_target: Callable[[], None],
    ) -> None:
        self._events, self._flows, self._sends = events, flows, sends
        self._ports, self._latency_s, self._bytes = ports, latency_s, num_bytes
        self._arrived = arrived
        self._wake_source, self._wake_target = wake_source, wake_target
        self._waiting: deque[Part] = deque()
        self._moving: Part | None = None
        self._there: deque[Part] = deque()
        self._wanted = False  # the receiver waits for the next message

    def put(self, part: Part) -> None:
        """The sender hands a message over."""
        self._waiting.append(part)
        self._begin()

    @property
    def is_full(self) -> bool:
        """Whether the sender must wait after what it has handed over."""
        outbox = self._sends.outbox
        if outbox is None:
            return False
        return len(self._waiting) > outbox or (outbox == 0 and self._moving is not None)

    def take(self, part: Part) -> bool:
        """The receiver asks for a message; whether it has it now. If not, it is woken later."""
        if not self._there:
            self._wanted = True
            self._begin()
            return False
        came = self._there.popleft()
        assert came == part, f"expected {part}, got {came}"
        self._wanted = False
        self._begin()
        return True

    def _begin(self) -> None:
        if self._moving is not None or not self._waiting:
            return
        inbox = self._sends.inbox
        if inbox is not None and len(self._there) >= inbox and not self._wanted:
            return
        self._moving = self._waiting.popleft()
        begin_s = self._events.now_s
        self._flows.start(self._ports, self._bytes, lambda: self._sent(begin_s))
        if self._sends.outbox:
            self._wake_source()

    def _sent(self, begin_s: float) -> None:
        self._events.at(self._events.now_s + self._latency_s, self._come, begin_s)

    def _come(self, begin_s: float) -> None:
        part, self._moving = self._moving, None
        assert part is not None
        self._there.append(part)
        self._wanted = False
        self._arrived(part, begin_s, self._events.now_s)
        self._wake_target()
        self._begin()
        if self._sends.outbox == 0:
            self._wake_source()
