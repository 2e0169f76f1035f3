"""The lines in which messages wait between two ranks, one for each direction's cargo.

Here each thing that happens to a message is an event. Runs that meet the conditions of
:mod:`.foresight` do with fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.links import Sends

Part: TypeAlias = tuple[int, int | None]
"""Number of the minibatch, and of its microbatch if it has some."""

Place: TypeAlias = tuple[tuple[object, ...], float | None] | None
"""Which messages of a line are where, by minibatches counted from a number; and when the one on its
way will have come: None where nothing is. None of all where nobody waits either. What comes up to
``soon_s`` counts as there."""

Arrived: TypeAlias = Callable[[Part, float, float], None]
"""Told of each message that has come: which, when it began its way, and when that ended."""


def places_of(parts: Iterable[Part], number: int) -> tuple[Part, ...]:
    """Parts with their minibatches counted from a number."""
    return tuple((minibatch - number, microbatch) for minibatch, microbatch in parts)


class Line:
    """Messages of one cargo from one rank to another, one on its way at a time.

    Args:
        events: in which they arrive.
        flows: that carry them.
        sends: what may wait where.
        ports: between the two ranks.
        latency_s: the same.
        num_bytes: of each message.
        arrived: see :data:`Arrived`; None: nobody is.
        wake_source: called when its sender may have room.
        wake_target: called when its receiver may have what it waits for.
    """

    __slots__ = (
        "_arrived",
        "_began_s",
        "_due_s",
        "_events",
        "_flow",
        "_flows",
        "_inbox",
        "_latency_s",
        "_moving",
        "_outbox",
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
        arrived: Arrived | None,
        wake_source: Callable[[], None],
        wake_target: Callable[[], None],
    ) -> None:
        self._events, self._flows = events, flows
        self._outbox, self._inbox = sends.outbox, sends.inbox
        self._flow = flows.way(ports, num_bytes, done=self._left)
        self._latency_s = latency_s
        self._arrived = arrived
        self._wake_source, self._wake_target = wake_source, wake_target
        self._waiting: deque[Part] = deque()
        self._moving: Part | None = None
        self._began_s = 0.0  # when what moves did so
        self._due_s = 0.0  # when it comes, once its last byte has left
        self._there: deque[Part] = deque()
        self._wanted = False  # the receiver waits for the next message

    def put(self, part: Part) -> None:
        """The sender hands a message over."""
        self._waiting.append(part)
        if self._moving is None:
            self._begin()

    @property
    def is_full(self) -> bool:
        """Whether the sender must wait after what it has handed over."""
        outbox = self._outbox
        if outbox is None:
            return False
        return len(self._waiting) > outbox or (outbox == 0 and self._moving is not None)

    def take(self, part: Part, asks_s: float) -> float | None:
        """The receiver asks for a message: since when it is there; None: it is woken later.

        Args:
            part: which, the next one in order.
            asks_s: when; now.
        """
        has = bool(self._there)
        if has:
            came = self._there.popleft()
            assert came == part, f"expected {part}, got {came}"
        self._wanted = not has
        if self._inbox is not None and self._moving is None:
            self._begin()
        return asks_s if has else None

    def _begin(self) -> None:
        """Lets the next message begin its way, if there is one and it may."""
        if not self._waiting:
            return
        inbox = self._inbox
        if inbox is not None and len(self._there) >= inbox and not self._wanted:
            return
        self._moving = self._waiting.popleft()
        self._began_s = self._events.now_s
        self._flows.start(self._flow)
        if self._outbox:
            self._wake_source()

    def _left(self) -> None:
        self._due_s = self._events.now_s + self._latency_s
        if self._latency_s:
            self._events.at(self._due_s, self._come, None)
        else:
            self._come(None)

    def _come(self, nothing: None) -> None:
        part, self._moving = self._moving, None
        assert part is not None
        self._there.append(part)
        self._wanted = False
        if self._arrived is not None:
            self._arrived(part, self._began_s, self._events.now_s)
        self._wake_target()
        if self._moving is None:
            self._begin()
        if self._outbox == 0:
            self._wake_source()

    def standing(self, number: int, soon_s: float) -> Place:
        """See :data:`Place`."""
        del soon_s  # what is about to happen has an event
        if self._moving is None and not (self._waiting or self._there or self._wanted):
            return None
        waiting, there = places_of(self._waiting, number), places_of(self._there, number)
        if self._moving is None:
            return (waiting, None, there, self._wanted), None
        flow, (moving, microbatch) = self._flow, self._moving
        place = (waiting, (moving - number, microbatch, flow.is_done), there, self._wanted)
        return place, self._due_s if flow.is_done else flow.end_s
