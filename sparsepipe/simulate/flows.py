"""The event queue, and bytes on their way over ports that several messages share.

Each message runs through one or more ports (a network card's sending side, another one's
receiving side). A port gives every message that runs through it the same share, and a message
goes as fast as the least of its shares, which is what TCP comes to on a switch whose links carry
few long messages. Shares that a message cannot use, since another port holds it back, are not
handed on to others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias


class Events:
    """Calls in the order of their times; those of one time in the order of their addition."""

    __slots__ = ("_added", "_afterwards", "_heap", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._added = 0
        self._afterwards: list[Callable[[], None]] = []
        self.now_s = 0.0

    def at(self, time_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Calls ``call(argument)`` at a time, which is not before now."""
        self._added += 1
        heapq.heappush(self._heap, (time_s, self._added, call, argument))

    def before_time_goes_on(self, call: Callable[[], None]) -> None:
        """Calls ``call()`` now, after everything else that happens now.

        Calls that it adds in turn by this method run after the next event.
        """
        self._afterwards.append(call)

    @property
    def next_s(self) -> float:
        """Time of the next call; infinite where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def run(self) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now_s, _, call, argument = pop(heap)
            call(argument)
            if self._afterwards and (not heap or heap[0][0] > self.now_s):
                calls, self._afterwards = self._afterwards, []
                for each in calls:
                    each()


Callback: TypeAlias = Callable[[], None]


class Flow:
    """A way that messages of one size go, one at a time; and the message under way.

    Args:
        ports: that it runs through; none: it takes no time.
        alone_s: seconds that a message takes which shares no port.
        done: called when the last byte of a message has come; None: it is not called.
        retimed: called when it turns out that this will be at another time; None: it is not.
        is_predicted: the end of a message that shares no port is no event.

    Attributes:
        end_s: when the message's last byte comes or came, as far as is known; infinite while that
            is not.
        has_event: whether that is an event.
        is_done: whether this has happened.
        is_shared: whether the message shares a port, or has done so.
    """

    __slots__ = (
        "alone_s",
        "done",
        "end_s",
        "has_event",
        "is_done",
        "is_predicted",
        "is_shared",
        "left_bytes",
        "num_bytes",
        "ports",
        "rate",
        "retimed",
        "since_s",
    )

    def __init__(
        self,
        ports: tuple[int, ...],
        num_bytes: float,
        *,
        alone_s: float = 0.0,
        done: Callback | None = None,
        retimed: Callback | None = None,
        is_predicted: bool = False,
    ) -> None:
        self.ports, self.num_bytes, self.alone_s = ports, num_bytes, alone_s
        self.done, self.retimed, self.is_predicted = done, retimed, is_predicted
        self.end_s = self.since_s = 0.0
        self.left_bytes = num_bytes  # since then; where it shares ports, as what follows
        self.rate = 0.0
        self.is_done = True
        self.is_shared = self.has_event = False


class Flows:
    """All messages that are under way.

    Rates change when all that begins and ends at one time has done so: a sum over a thousand
    ranks begins and ends thousands of messages at once. The end of a message that shares no port
    concerns no other message, and is known from the beginning: so it is no event where it is
    predicted by the rank that waits for it.
    """

    def __init__(self, events: Events, bytes_per_s: Sequence[float]) -> None:
        self._events = events
        self._speeds = bytes_per_s
        # By port: what went through it alone, at last; and what shares it or has shared it.
        self._alone = [Flow((), 0.0)] * len(bytes_per_s)
        self._sharing: list[dict[Flow, None]] = [{} for _ in bytes_per_s]
        self._changed: dict[int, None] = {}  # ports that more or fewer messages share

    def way(
        self,
        ports: tuple[int, ...],
        num_bytes: float,
        *,
        done: Callback | None = None,
        retimed: Callback | None = None,
        is_predicted: bool = False,
    ) -> Flow:
        """A way on which messages can be sent; see :class:`Flow`."""
        alone_s = 0.0
        if num_bytes <= 0:
            ports = ()
        elif ports:
            alone_s = num_bytes / min(self._speeds[port] for port in ports)
        return Flow(
            ports,
            num_bytes,
            alone_s=alone_s,
            done=done,
            retimed=retimed,
            is_predicted=is_predicted,
        )

    def start(self, flow: Flow) -> None:
        """Sends a message, after the last one on that way has come."""
        now_s = flow.since_s = self._events.now_s
        flow.is_done = flow.has_event = False
        for port in flow.ports:
            if self._sharing[port] or self._alone[port].end_s > now_s:
                self._join(flow)
                return
        for port in flow.ports:
            self._alone[port] = flow
        flow.end_s = now_s + flow.alone_s
        if not flow.is_predicted:
            self._schedule_end(flow)

    def _join(self, flow: Flow) -> None:
        """Lets a message share ports; those that went alone through them now share theirs."""
        for other in [self._alone[port] for port in flow.ports]:
            if other.end_s > flow.since_s and not other.is_shared:
                other.left_bytes, other.rate = other.num_bytes, other.num_bytes / other.alone_s
                self._share(other)
        flow.left_bytes, flow.rate, flow.end_s = flow.num_bytes, 0.0, float("inf")
        self._share(flow)

    def _share(self, flow: Flow) -> None:
        flow.is_shared = True
        for port in flow.ports:
            self._sharing[port][flow] = None
        self._change(flow.ports)

    def _change(self, ports: Iterable[int]) -> None:
        if not self._changed:
            self._events.before_time_goes_on(self.update_rates)
        for port in ports:
            self._changed[port] = None

    def update_rates(self) -> None:
        """Gives whatever shares ports that have changed its new rate."""
        if not self._changed:
            return
        ports, self._changed = self._changed, {}
        sharing, speeds = self._sharing, self._speeds
        for flow in {flow: None for port in ports for flow in sharing[port]}:
            rate = min([speeds[port] / len(sharing[port]) for port in flow.ports])
            if rate != flow.rate:
                self._set_rate(flow, rate)
            elif not flow.has_event:  # its end is to change others' rates
                self._schedule_end(flow)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now_s = self._events.now_s
        flow.left_bytes -= flow.rate * (now_s - flow.since_s)
        flow.rate, flow.since_s = rate, now_s
        flow.end_s = now_s + max(flow.left_bytes, 0.0) / rate
        self._schedule_end(flow)
        if flow.retimed is not None:
            flow.retimed()

    def _schedule_end(self, flow: Flow) -> None:
        flow.has_event = True
        self._events.at(flow.end_s, self._end, flow)

    def _end(self, flow: Flow) -> None:
        if flow.is_done or flow.end_s != self._events.now_s:
            return  # rescheduled since
        flow.is_done = True
        if flow.is_shared:
            flow.is_shared = False
            for port in flow.ports:
                del self._sharing[port][flow]
                if self._sharing[port]:
                    self._change((port,))
        if flow.done is not None:
            flow.done()
