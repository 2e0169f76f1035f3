"""Bytes on their way, where several ways share what they run through.

Each message runs through one or more ports (a network card's sending side, another one's
receiving side). A port gives every message that runs through it the same share, and a message
goes as fast as the least of its shares, which is what TCP comes to on a switch whose links carry
few long messages. Shares that a message cannot use, since another port holds it back, are not
handed on to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from sparsepipe.simulate.events import Events

Done: TypeAlias = Callable[[], None]


class Flow:
    """A message under way: what is left of it, and since when it goes at what rate.

    Attributes:
        end_s: when its last byte will have come if nothing changes.
        is_done: whether it has.
    """

    __slots__ = ("done", "end_s", "is_done", "left_bytes", "ports", "rate", "since_s", "turn")

    def __init__(self, ports: tuple[int, ...], num_bytes: float, done: Done, now_s: float) -> None:
        self.ports = ports
        self.left_bytes = num_bytes
        self.done = done
        self.rate = 0.0
        self.since_s = self.end_s = now_s
        self.is_done = False
        self.turn = 0  # counts changes of the rate: an end foreseen before one is void


class Flows:
    """All messages that are under way.

    Rates change when all that begins and ends at one time has done so: a sum over a thousand
    ranks begins and ends thousands of messages at once.

    Args:
        events: in which their ends happen.
        bytes_per_s: of each port.
    """

    def __init__(self, events: Events, bytes_per_s: Sequence[float]) -> None:
        self._events = events
        self._speeds = bytes_per_s
        self._through: list[dict[Flow, None]] = [{} for _ in bytes_per_s]
        self._changed: dict[int, None] = {}  # ports that more or fewer messages run through

    def start(self, ports: tuple[int, ...], num_bytes: float, done: Done) -> Flow:
        """Sends a message; ``done`` is called when its last byte has come.

        Args:
            ports: that it runs through; none: it takes no time.
            num_bytes: of the message.
            done: what follows.
        """
        flow = Flow(ports, num_bytes, done, self._events.now_s)
        if not ports or num_bytes <= 0:
            self._events.at(self._events.now_s, _finish, flow)
            return flow
        alone = True
        for port in ports:
            through = self._through[port]
            alone = alone and not through
            through[flow] = None
        if alone:
            self._set_rate(flow, min([self._speeds[port] for port in ports]))
        else:
            self._change(ports)
        return flow

    def _change(self, ports: Iterable[int]) -> None:
        if not self._changed:
            self._events.before_time_goes_on(self.settle)
        for port in ports:
            self._changed[port] = None

    def settle(self) -> None:
        """Gives whatever runs through ports that have changed its new rate."""
        if not self._changed:
            return
        ports, self._changed = self._changed, {}
        through, speeds = self._through, self._speeds
        for flow in {flow: None for port in ports for flow in through[port]}:
            rate = min([speeds[port] / len(through[port]) for port in flow.ports])
            if rate != flow.rate:
                self._set_rate(flow, rate)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now_s = self._events.now_s
        if flow.rate:
            flow.left_bytes -= flow.rate * (now_s - flow.since_s)
        flow.rate, flow.since_s = rate, now_s
        flow.turn += 1
        flow.end_s = now_s + max(flow.left_bytes, 0.0) / rate
        self._events.at(flow.end_s, self._end, (flow, flow.turn))

    def _end(self, foreseen: tuple[Flow, int]) -> None:
        flow, turn = foreseen
        if flow.turn != turn:
            return
        for port in flow.ports:
            through = self._through[port]
            del through[flow]
            if through:
                self._change((port,))
        _finish(flow)


def _finish(flow: Flow) -> None:
    flow.is_done = True
    flow.done()
