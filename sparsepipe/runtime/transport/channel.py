"""A channel's two ends: a thread each, so that transfers go on while the worker computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sparsepipe.runtime.transport.codec import Packet
from sparsepipe.runtime.transport.mailbox import Mailbox
from sparsepipe.runtime.transport.routes import Route
from sparsepipe.runtime.transport.wire import Arrival, Wire
from sparsepipe.schedule.inbox import INBOX_DEPTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ended a channel.

    Attributes:
        route: the channel.
        minibatch: the one under way; None where its thread waited for the next.
        error: what it met.
    """

    route: Route
    minibatch: int | None
    error: Exception


class FaultMet(Exception):
    """Carries a fault to whoever waits on a mailbox."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class Changed(Exception):
    """A tensor was written to between ``send`` and its transfer."""


_Report = Callable[[Fault], None]


class Outgoing:
    """The sending end.

    Args:
        route: what it is for.
        wire: how it sends.
        depth: packets it takes before :meth:`put` waits, beside the first one in transfer.
        usual: as many as it takes where senders are held back.
        report: called with what ended it, from the thread or in :meth:`put`.
    """

    def __init__(
        self, route: Route, wire: Wire, *, depth: int, usual: int, report: _Report
    ) -> None:
        self.route = route
        self._usual = usual
        self.box: Mailbox[tuple[Packet, Sequence[dist.Work], Any]] = Mailbox(depth)
        self._wire = wire
        self._report = report
        self.thread = _start(self._run, route, "out")

    def put(self, packet: Packet, *, made: Any, held_back: bool, limit_s: float) -> None:
        """Begins to send a packet, in the caller's thread: another one would have to wake up.

        Args:
            packet: the next.
            made: event after which its device tensors are ready; None where it has none.
            held_back: there is to be no more under way than usual, and packets do not repeat.
            limit_s: of the wait for room.

        Raises:
            TimeoutError: there was no room within ``limit_s``.
            FaultMet: the connection is broken.
        """
        self.box.wait_for_room(limit_s=limit_s, room=self._usual if held_back else None)
        try:
            works = self._wire.begin(packet, repeats=not held_back)
        except Exception as error:
            fault = Fault(route=self.route, minibatch=packet.minibatch, error=error)
            self._report(fault)
            self.box.wait_for_room()  # raises what was reported first
        self.box.put((packet, works, made))

    def _run(self) -> None:
        minibatch = None
        try:
            for packet, works, made in self.box:
                minibatch = packet.minibatch
                self._wire.end(packet, works, made)
                if packet.changed():
                    raise Changed
                minibatch = None
                del packet, works, made  # the tensors are free before the next ones come
            self._wire.send_end()
        except Exception as error:
            self._report(Fault(route=self.route, minibatch=minibatch, error=error))


class Incoming:
    """The receiving end.

    Args:
        route: what it is for.
        wire: how it receives.
        report: called from the thread with what ended it.
    """

    def __init__(self, route: Route, wire: Wire, *, report: _Report) -> None:
        self.route = route
        self.box: Mailbox[Arrival] = Mailbox(INBOX_DEPTH)
        self._wire = wire
        self._report = report
        self.thread = _start(self._run, route, "in")

    def _run(self) -> None:
        try:
            while True:
                self.box.wait_for_room()
                arrival = self._wire.receive()
                if arrival is None:
                    break
                self.box.put(arrival)
                del arrival
            self.box.end()
        except Exception as error:
            self._report(Fault(route=self.route, minibatch=None, error=error))


def _start(run: Callable[[], None], route: Route, end: str) -> threading.Thread:
    # A daemon: a wait that never ends must not keep the process.
    name = f"{route.kind.value}-{route.source}-{route.target}-{end}"
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
