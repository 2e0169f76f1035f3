"""Bytes on their way, where several ways share what they run through.

Each message runs through one or more ports (a network card's sending side, another one's
receiving side). A port gives every message that runs through it the same share, and a message
goes as fast as the least of its shares, which is what TCP comes to on a switch whose links carry
few long messages. Shares that a message cannot use, since another port holds it back, are not
handed on to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsepipe.simulate.events import Events


class _Flow:
    """A message under way: what is left of it, and since when it goes at what rate."""

    __slots__ = ("done", "left_bytes", "ports", "rate", "since_s", "turn")

    def __init__(
        self, ports: tuple[int, ...], num_bytes: float, done: Callable[[], None], now_s: float
    ) -> None:
        self.ports = ports
        self.left_bytes = num_bytes
        self.done = done
        self.rate = 0.0
        self.since_s = now_s
        self.turn = 0  # counts changes of the rate: an end foreseen before one is void


class Flows:
    """All messages that are under way.

    Args:
        events: in which their ends happen.
        bytes_per_s: of each port.
    """

    def __init__(self, events: Events, bytes_per_s: Sequence[float]) -> None:
        self._events = events
        self._speeds = bytes_per_s
        self._through: list[dict[_Flow, None]] = [{} for _ in bytes_per_s]

    def start(self, ports: tuple[int, ...], num_bytes: float, done: Callable[[], None]) -> None:
        """Sends a message; ``done`` is called when its last byte has come.

        Args:
            ports: that it runs through; none: it takes no time.
            num_bytes: of the message.
            done: what follows.
        """
        flow = _Flow(ports, num_bytes, done, self._events.now_s)
        if not ports or num_bytes <= 0:
            self._events.at(self._events.now_s, _finish, flow)
            return
        for port in ports:
            self._through[port][flow] = None
        self._share_out(ports)

    def _share_out(self, ports: tuple[int, ...]) -> None:
        """Gives whatever runs through some ports its new rate."""
        now_s, through, speeds = self._events.now_s, self._through, self._speeds
        for flow in {flow: None for port in ports for flow in through[port]}:
            rate = min([speeds[port] / len(through[port]) for port in flow.ports])
            if rate == flow.rate:
                continue
            if flow.rate:
                flow.left_bytes -= flow.rate * (now_s - flow.since_s)
            flow.rate, flow.since_s = rate, now_s
            flow.turn += 1
            end_s = now_s + max(flow.left_bytes, 0.0) / rate
            self._events.at(end_s, self._end, (flow, flow.turn))

    def _end(self, foreseen: tuple[_Flow, int]) -> None:
        flow, turn = foreseen
        if flow.turn != turn:
            return
        for port in flow.ports:
            del self._through[port][flow]
        flow.done()
        self._share_out(flow.ports)


def _finish(flow: _Flow) -> None:
    flow.done()
