"""The event queue, and messages on their way through ports that they share.

Each message runs through some ports, such as the sending side of one network card and the receiving
side of another. A port gives every message that runs through it the same share of its speed, and a
message moves at the smallest of its shares, about as with TCP on a switch whose links carry few
long messages. If another port limits a message, the unused part of its share is not given to other
messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

Callback: TypeAlias = Callable[[], None]


class EventQueue:
    """Runs calls in the order of their times; those at the same time in the order of addition.

    Attributes:
        heap: the pending calls as (time, number in the order of addition, call), in heap order.
        now_s: time of the current call, in seconds from the beginning of the run.
    """

    __slots__ = ("_added", "_afterwards", "heap", "now_s")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Callback]] = []
        self._added = 0
        self._afterwards: list[Callback] = []
        self.now_s = 0.0

    def at(self, time_s: float, call: Callback) -> None:
        """Schedules ``call()`` for ``time_s``, which must not be in the past."""
        self._added += 1
        heapq.heappush(self.heap, (time_s, self._added, call))

    def before_time_goes_on(self, call: Callback) -> None:
        """Schedules ``call()`` for the present time, after all other calls at that time."""
        self._afterwards.append(call)

    def run(self) -> None:
        heap, pop = self.heap, heapq.heappop
        while heap:
            self.now_s, _, call = pop(heap)
            call()
            if self._afterwards and (not heap or heap[0][0] > self.now_s):
                calls, self._afterwards = self._afterwards, []
                for each in calls:
                    each()


class Flow:
    """A route for messages of one size, one at a time, and the message under way.

    Args:
        ports: numbers of the ports that messages run through; without any, they take no time.
        num_bytes: size of a message.
        alone_s: seconds that a message takes if it shares no port.
        done: called when the last byte of a message has passed all ports.

    Attributes:
        end_s: when the message's last byte passes or has passed, at the present rate; infinite
            while the rate is unknown.
        is_shared: whether the message shares a port, or has done so.
    """

    __slots__ = (
        "alone_s",
        "done",
        "end_s",
        "is_done",
        "is_shared",
        "left_bytes",
        "num_bytes",
        "ports",
        "rate",
        "since_s",
    )

    def __init__(
        self, ports: tuple[int, ...], num_bytes: float, *, alone_s: float, done: Callback
    ) -> None:
        self.ports, self.num_bytes, self.alone_s, self.done = ports, num_bytes, alone_s, done
        self.end_s = self.since_s = self.rate = 0.0
        self.left_bytes = num_bytes  # at ``since_s``, while it shares ports
        self.is_done, self.is_shared = True, False


class Flows:
    """All messages that are under way.

    Rates are computed once for all messages that begin or end at the same time, since a sum may
    have thousands of them.
    """

    def __init__(self, events: EventQueue, bytes_per_s: Sequence[float]) -> None:
        self._events = events
        self._speeds = bytes_per_s
        nothing = Flow((), 0.0, alone_s=0.0, done=lambda: None)
        # By port: the last message that used it alone, and the messages that share it.
        self._alone = [nothing] * len(bytes_per_s)
        self._sharing: list[dict[Flow, None]] = [{} for _ in bytes_per_s]
        self._changed: dict[int, None] = {}  # ports whose number of messages has changed

    def route(self, ports: tuple[int, ...], num_bytes: float, *, done: Callback) -> Flow:
        """Makes a route for messages of ``num_bytes``; ``done``: as for :class:`Flow`."""
        ports = ports if num_bytes > 0 else ()
        alone_s = num_bytes / min(self._speeds[port] for port in ports) if ports else 0.0
        return Flow(ports, num_bytes, alone_s=alone_s, done=done)

    def start(self, flow: Flow) -> None:
        """Sends a message on a route, whose previous message must have passed."""
        now_s = flow.since_s = self._events.now_s
        flow.is_done = False
        if any(self._sharing[port] or self._alone[port].end_s > now_s for port in flow.ports):
            for other in [self._alone[port] for port in flow.ports]:
                if other.end_s > now_s and not other.is_shared:
                    other.left_bytes, other.rate = other.num_bytes, other.num_bytes / other.alone_s
                    self._share(other)
            flow.left_bytes, flow.rate, flow.end_s = flow.num_bytes, 0.0, float("inf")
            self._share(flow)
        else:
            for port in flow.ports:
                self._alone[port] = flow
            self._end_at(flow, now_s + flow.alone_s)

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
        """Updates the rate of each message on a port whose number of messages has changed."""
        ports, self._changed = self._changed, {}
        now_s, sharing, speeds = self._events.now_s, self._sharing, self._speeds
        for flow in {flow: None for port in ports for flow in sharing[port]}:
            rate = min([speeds[port] / len(sharing[port]) for port in flow.ports])
            if rate != flow.rate:
                flow.left_bytes -= flow.rate * (now_s - flow.since_s)
                flow.rate, flow.since_s = rate, now_s
                self._end_at(flow, now_s + max(flow.left_bytes, 0.0) / rate)

    def _end_at(self, flow: Flow, time_s: float) -> None:
        flow.end_s = time_s
        self._events.at(time_s, partial(self._end, flow))

    def _end(self, flow: Flow) -> None:
        if flow.is_done or flow.end_s != self._events.now_s:
            return  # the rate has changed since
        flow.is_done = True
        if flow.is_shared:
            flow.is_shared = False
            for port in flow.ports:
                del self._sharing[port][flow]
                if self._sharing[port]:
                    self._change((port,))
        flow.done()
