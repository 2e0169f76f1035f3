"""Queues of messages between two ranks: one for each direction and kind of message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.flows import EventQueue, Flows
from sparsepipe.simulate.network import ClusterNetwork, Sends
from sparsepipe.simulate.workload import Workload

State: TypeAlias = tuple[tuple[object, ...], list[float]]
"""The discrete state of a queue or of sums, and the times at which their transfers will end."""

Part: TypeAlias = tuple[int, int | None]
"""Number of a minibatch, and of its microbatch; the second is None if it is not split."""

CARGO = {"F": "activation", "B": "gradient"}
"""The kind of message that an action sends, by kind of action."""


class MessageQueue:
    """Messages of one kind from one rank to another; only one is on its way at a time.

    Args:
        ports: numbers of the ports that messages run through.
        latency_s: seconds from the sending of a message's last byte to its arrival.
        num_bytes: size of a message.
        came: called when a message has arrived, with its minibatch and microbatch, and the time in
            seconds at which it began to move.
        wake_source: called when the queue may have room for the sender's next message.
        wake_target: called when a message has arrived for the receiver.
    """

    def __init__(
        self,
        events: EventQueue,
        flows: Flows,
        sends: Sends,
        *,
        ports: tuple[int, ...],
        latency_s: float,
        num_bytes: float,
        came: Callable[[Part, float], None],
        wake_source: Callable[[], None],
        wake_target: Callable[[], None],
    ) -> None:
        self._events, self._flows = events, flows
        self._outbox, self._inbox = sends.outbox, sends.inbox
        self._flow = flows.route(ports, num_bytes, done=self._left)
        self._latency_s, self._came = latency_s, came
        self._wake_source, self._wake_target = wake_source, wake_target
        self._waiting: deque[Part] = deque()
        self._moving: Part | None = None
        self._began_s = 0.0  # when the message under way began to move
        self._due_s = 0.0  # when it arrives, known once its last byte has left
        self._there: deque[Part] = deque()
        self._is_awaited = False  # the receiver waits for the next message

    @property
    def is_full(self) -> bool:
        """Whether the sender must wait before its next action."""
        if self._outbox is None:
            return False
        return len(self._waiting) > self._outbox or (self._outbox == 0 and self._moving is not None)

    def put(self, part: Part) -> None:
        self._waiting.append(part)
        if self._moving is None:
            self._begin()

    def take(self, part: Part) -> bool:
        """Takes the next message, which must be that of ``part``; returns whether one has arrived.

        If not, the receiver is woken when it arrives.
        """
        has = bool(self._there)
        if has:
            came = self._there.popleft()
            assert came == part, f"expected {part}, got {came}"
        self._is_awaited = not has
        if self._inbox is not None and self._moving is None:
            self._begin()
        return has

    def _begin(self) -> None:
        inbox = self._inbox
        has_room = inbox is None or len(self._there) < inbox or self._is_awaited
        if self._waiting and has_room:
            self._moving = self._waiting.popleft()
            self._began_s = self._events.now_s
            self._flows.start(self._flow)
            if self._outbox:
                self._wake_source()

    def _left(self) -> None:
        self._due_s = self._events.now_s + self._latency_s
        if self._latency_s:
            self._events.at(self._due_s, self._arrive)
        else:
            self._arrive()

    def _arrive(self) -> None:
        part, self._moving = self._moving, None
        assert part is not None
        self._there.append(part)
        self._is_awaited = False
        self._came(part, self._began_s)
        self._wake_target()
        if self._moving is None:
            self._begin()
        if self._outbox == 0:
            self._wake_source()

    def state(self, number: int) -> State | None:
        """Where messages are, with minibatches counted from ``number``, and when the last byte of
        the one under way leaves or, if it has left, arrives. None: the queue is empty, and the
        receiver waits for no message.
        """
        if self._moving is None and not (self._waiting or self._there or self._is_awaited):
            return None

        def counted(parts: Iterable[Part]) -> tuple[Part, ...]:
            return tuple((minibatch - number, microbatch) for minibatch, microbatch in parts)

        place = counted(self._waiting), counted(self._there), self._is_awaited
        if self._moving is None:
            return place, []
        flow = self._flow
        end_s = self._due_s if flow.is_done else flow.end_s
        return (*place, counted([self._moving]), flow.is_done), [end_s]


class Messages:
    """All queues of a run, each made when its first message is sent or awaited.

    Args:
        transfers: list to which the spans of messages are added; None: they are not recorded.
        wake: called with the number of a rank that may be able to proceed.
    """

    def __init__(
        self,
        workload: Workload,
        network: ClusterNetwork,
        sends: Sends,
        events: EventQueue,
        flows: Flows,
        *,
        transfers: list[Span] | None,
        wake: Callable[[int], None],
    ) -> None:
        self._workload, self._network, self._sends = workload, network, sends
        self._events, self._flows = events, flows
        self._transfers, self._wake = transfers, wake
        self._queues: dict[tuple[str, int, int], MessageQueue] = {}
        plan = workload.plan
        stages = [list(plan.ranks_of(stage)) for stage in range(plan.num_stages)]
        of_ranks = [stage for stage, ranks in enumerate(stages) for _ in ranks]
        self._before = [stages[stage - 1] if stage else [] for stage in of_ranks]
        self._behind = [[*stages, []][stage + 1] for stage in of_ranks]

    def queue_of(self, rank: int, action: Action, *, incoming: bool) -> MessageQueue | None:
        """The queue from which ``action`` takes (``incoming``) or to which it sends, if any."""
        peers = (self._before if (action.kind == "F") == incoming else self._behind)[rank]
        if not peers:
            return None
        peer = peers[action.turn % len(peers)]
        ends = (peer, rank) if incoming else (rank, peer)
        return self._queue(action.kind, *ends)

    def states(self, number: int) -> Iterator[tuple[object, State]]:
        """Yields key (kind, sender, receiver) and :meth:`MessageQueue.state` of each busy queue."""
        for key, queue in self._queues.items():
            if (state := queue.state(number)) is not None:
                yield key, state

    def _queue(self, kind: str, source: int, target: int) -> MessageQueue:
        if (found := self._queues.get((kind, source, target))) is not None:
            return found
        plan = self._workload.plan
        costs = self._workload.stages[min(plan.stage_of(source), plan.stage_of(target))]
        num_bytes = costs.output_bytes if kind == "F" else costs.gradient_bytes

        def came(part: Part, start_s: float) -> None:
            if self._transfers is not None:
                span = Span(
                    source,
                    CARGO[kind],
                    *part,
                    start=start_s,
                    end=self._events.now_s,
                    target=target,
                    num_bytes=num_bytes,
                )
                self._transfers.append(span)

        queue = self._queues[kind, source, target] = MessageQueue(
            self._events,
            self._flows,
            self._sends,
            ports=self._network.ports(source, target),
            latency_s=self._network.latency_s(source, target),
            num_bytes=num_bytes,
            came=came,
            wake_source=partial(self._wake, source),
            wake_target=partial(self._wake, target),
        )
        return queue
