"""Lines whose receivers know beforehand when a message comes.

Most of a long run's events would be messages that have come. But a message that shares no link
comes when it was to come as it left; and nothing keeps it from being taken then. So a receiver that
waits for a message on its way begins what that is for at the time foreseen, and no event is needed.
Where messages share links, the time may become another while they are on their way: then the
receiver is told, and begins earlier or later.

That is right where four conditions hold; in other runs each message's arrival is an event
(:mod:`.lines`):

- a sender has room for any number of messages (no ``outbox``), so that it never waits for one to
  leave;
- a receiver has room for one at least (``inbox`` is not 0), so that a message need not wait until
  it is asked for;
- sums follow the backward (no ``bucket_bytes``), so that no sum hangs on when a backward begins;
- spans, transfers and sums are not recorded, so that nobody wants to know of what has no event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.lines import Part, Place, places_of


class ForeseenLine:
    """Messages of one cargo from one rank to another, one on its way at a time.

    Any number of them may wait at the sender.

    Args:
        events: in which those leave that have waited.
        flows: that carry them.
        inbox: how many may lie at the receiver, at least 1; None: any number.
        ports: between the two ranks.
        latency_s: the same.
        num_bytes: of each message.
        wake: called when the receiver waits for a message and can know when it comes.
        settle: called when the receiver counts on a message, with the time at which that comes
            now.
    """

    __slots__ = (
        "_due_s",
        "_events",
        "_flow",
        "_flows",
        "_inbox",
        "_is_taken",
        "_latency_s",
        "_moving",
        "_settle",
        "_taken_s",
        "_there",
        "_waiting",
        "_wake",
        "_wanted",
    )

    is_full = False

    def __init__(
        self,
        events: Events,
        flows: Flows,
        *,
        inbox: int | None,
        ports: tuple[int, ...],
        latency_s: float,
        num_bytes: float,
        wake: Callable[[], None],
        settle: Callable[[float], None],
    ) -> None:
        assert inbox is None or inbox > 0
        self._events, self._flows, self._inbox = events, flows, inbox
        self._flow = flows.way(ports, num_bytes, retimed=self._retimed, is_foreseen=True)
        self._latency_s, self._wake, self._settle = latency_s, wake, settle
        self._waiting: deque[Part] = deque()
        self._moving: Part | None = None  # the last one that left, until the next one does
        self._due_s = 0.0  # when it comes; infinite while that is not known
        self._is_taken = False  # it was asked for, whether it has come or not
        self._taken_s = 0.0  # when the last one that was asked for was; that may be still to come
        self._there: deque[Part] = deque()  # what has come before it
        self._wanted = False  # the receiver waits for a message that has not left

    def put(self, part: Part) -> None:
        """The sender hands a message over."""
        if not self._waiting and self._free_s() <= self._events.now_s:
            self._begin(part)
            return
        self._waiting.append(part)
        if len(self._waiting) == 1:
            self._await()

    def take(self, part: Part, asks_s: float) -> float | None:
        """The receiver asks for a message: when it comes or came; None: it is woken later.

        Args:
            part: which, the next one in order.
            asks_s: when the receiver can begin what it is for; now, or later.
        """
        if self._there:
            came, there_s = self._there.popleft(), 0.0
        elif self._moving is None or self._is_taken or self._due_s == float("inf"):
            self._wanted = True
            return None
        else:
            came, there_s, self._is_taken = self._moving, self._due_s, True
        assert came == part, f"expected {part}, got {came}"
        self._wanted, self._taken_s = False, asks_s
        if self._waiting and self._inbox is not None:
            self._await()
        return there_s

    def _free_s(self) -> float:
        """From when on the next message may begin its way; infinite: that is not known yet."""
        if self._moving is None:
            return 0.0
        if self._inbox is None:
            return self._due_s
        lying = len(self._there) + (not self._is_taken)  # once the one that moves has come
        if lying >= self._inbox:
            return float("inf")
        if lying + 1 == self._inbox:  # before the last one was taken there was no room
            return max(self._due_s, self._taken_s)
        return self._due_s

    def _begin(self, part: Part) -> None:
        """Lets a message begin its way, since the one before it has come."""
        if self._moving is not None and not self._is_taken:
            self._there.append(self._moving)
        self._moving, self._is_taken = part, False
        self._flows.start(self._flow)
        self._due_s = self._flow.end_s + self._latency_s
        if self._wanted and self._due_s < float("inf"):
            self._wake()

    def _retimed(self) -> None:
        """What moves will come at another time than it seemed."""
        self._due_s = self._flow.end_s + self._latency_s
        if self._is_taken:
            self._settle(self._due_s)
        elif self._wanted:
            self._wake()
        if self._waiting:
            self._await()

    def _await(self) -> None:
        free_s = self._free_s()
        if free_s < float("inf"):
            self._events.at(max(free_s, self._events.now_s), self._go, None)

    def _go(self, nothing: None) -> None:
        if self._waiting and self._free_s() <= self._events.now_s:  # else: foreseen wrongly
            self._begin(self._waiting.popleft())
            if self._waiting:
                self._await()

    def standing(self, number: int, soon_s: float) -> Place:
        """See :data:`~sparsepipe.simulate.lines.Place`."""
        waiting, there = places_of(self._waiting, number), places_of(self._there, number)
        if self._moving is None:
            return ((waiting, None, there, self._wanted), None) if self._wanted else None
        moving = self._moving[0] - number, self._moving[1]
        if self._due_s <= soon_s:
            there = there if self._is_taken else (*there, moving)
            if not (waiting or there or self._wanted):
                return None
            return (waiting, None, there, self._wanted), None
        end_s = self._flow.end_s
        place = (waiting, (*moving, self._is_taken, end_s <= soon_s), there, self._wanted)
        return place, end_s if end_s > soon_s else self._due_s
