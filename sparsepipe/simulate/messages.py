"""The queues in which messages wait between two ranks, one for each direction's cargo.

In a :class:`MessageQueue` each thing that happens to a message is an event. But most of a long
run's events would be messages that arrive, and a message that shares no link arrives at the time
that was known when it left. So the receiver that waits at a :class:`PredictedQueue` begins its next
action at the predicted time, and no event is needed. Where messages share links, the time may
change while they are on their way: then the receiver is called, and begins earlier or later.

That is right where four conditions hold; other runs have a :class:`MessageQueue` for each pair:

- a sender has room for any number of messages (no ``outbox``), so that it never waits for one to
  leave;
- a receiver has room for one at least (``inbox`` is not 0), so that a message need not wait until
  its receiver is ready for it;
- sums follow the backward (no ``bucket_bytes``), so that no sum depends on when a backward begins;
- spans, transfers and sums are not recorded, since there are no events to record them at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from sparsepipe.simulate.flows import Events, Flows
from sparsepipe.simulate.network import Network, Sends
from sparsepipe.simulate.record import Cargo, Transfer
from sparsepipe.simulate.workload import Workload

Part: TypeAlias = tuple[int, int | None]
"""Number of the minibatch, and of its microbatch if it has some."""

Place: TypeAlias = tuple[tuple[object, ...], float | None] | None
"""Which messages of a line are where, by minibatches counted from a number; and when the one on its
way will have come: None where nothing is. None of all where no rank waits either. What comes up to
``horizon_s`` counts as there."""

Arrived: TypeAlias = Callable[[Part, float, float], None]
"""Called with each message that has come, when its transfer began, and when it ended."""


def places_of(parts: Iterable[Part], number: int) -> tuple[Part, ...]:
    """Parts with their minibatches counted from a number."""
    return tuple((minibatch - number, microbatch) for minibatch, microbatch in parts)


class MessageQueue:
    """Messages of one cargo from one rank to another, one on its way at a time.

    Args:
        arrived: see :data:`Arrived`; None: it is not called.
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
        "_is_awaited",
        "_latency_s",
        "_moving",
        "_outbox",
        "_there",
        "_waiting",
        "_wake_source",
        "_wake_target",
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
        self._is_awaited = False  # the receiver waits for the next message

    def put(self, part: Part) -> None:
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

    def take(self, part: Part, ready_s: float) -> float | None:
        """The receiver takes a message: when it can go on; None: it is woken later."""
        has = bool(self._there)
        if has:
            came = self._there.popleft()
            assert came == part, f"expected {part}, got {came}"
        self._is_awaited = not has
        if self._inbox is not None and self._moving is None:
            self._begin()
        return ready_s if has else None

    def _begin(self) -> None:
        """Lets the next message begin its way, if there is one and it may."""
        if not self._waiting:
            return
        inbox = self._inbox
        if inbox is not None and len(self._there) >= inbox and not self._is_awaited:
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
        self._is_awaited = False
        if self._arrived is not None:
            self._arrived(part, self._began_s, self._events.now_s)
        self._wake_target()
        if self._moving is None:
            self._begin()
        if self._outbox == 0:
            self._wake_source()

    def state(self, number: int, horizon_s: float) -> Place:
        del horizon_s  # what is about to happen has an event
        if self._moving is None and not (self._waiting or self._there or self._is_awaited):
            return None
        waiting, there = places_of(self._waiting, number), places_of(self._there, number)
        if self._moving is None:
            return (waiting, None, there, self._is_awaited), None
        flow, (moving, microbatch) = self._flow, self._moving
        place = (waiting, (moving - number, microbatch, flow.is_done), there, self._is_awaited)
        return place, self._due_s if flow.is_done else flow.end_s


class PredictedQueue:
    """Messages of one cargo from one rank to another, one on its way at a time.

    Any number of them may wait at the sender.

    Args:
        inbox: how many may lie at the receiver, at least 1; None: any number.
        wake: called when the receiver waits for a message and can know when it comes.
        reschedule: called when the receiver counts on a message, with the time at which that comes
            now.
    """

    __slots__ = (
        "_due_s",
        "_events",
        "_flow",
        "_flows",
        "_inbox",
        "_is_awaited",
        "_is_taken",
        "_latency_s",
        "_moving",
        "_reschedule",
        "_taken_s",
        "_there",
        "_waiting",
        "_wake",
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
        reschedule: Callable[[float], None],
    ) -> None:
        assert inbox is None or inbox > 0
        self._events, self._flows, self._inbox = events, flows, inbox
        self._flow = flows.way(ports, num_bytes, retimed=self._retimed, is_predicted=True)
        self._latency_s, self._wake, self._reschedule = latency_s, wake, reschedule
        self._waiting: deque[Part] = deque()
        self._moving: Part | None = None  # the last one that left, until the next one does
        self._due_s = 0.0  # when it comes; infinite while that is not known
        self._is_taken = False  # by the receiver, whether it has come or not
        self._taken_s = 0.0  # when the last one was or will be taken
        self._there: deque[Part] = deque()  # what has come before it
        self._is_awaited = False  # the receiver waits for a message that has not left

    def put(self, part: Part) -> None:
        if not self._waiting and self._free_s() <= self._events.now_s:
            self._begin(part)
            return
        self._waiting.append(part)
        if len(self._waiting) == 1:
            self._await()

    def take(self, part: Part, ready_s: float) -> float | None:
        """The receiver can begin what a message is for at ``ready_s``, now or later: when the
        message comes or came; None: it is woken later.
        """
        if self._there:
            came, there_s = self._there.popleft(), 0.0
        elif self._moving is None or self._is_taken or self._due_s == float("inf"):
            self._is_awaited = True
            return None
        else:
            came, there_s, self._is_taken = self._moving, self._due_s, True
        assert came == part, f"expected {part}, got {came}"
        self._is_awaited, self._taken_s = False, ready_s
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
        if self._is_awaited and self._due_s < float("inf"):
            self._wake()

    def _retimed(self) -> None:
        """The message under way will come at another time than predicted."""
        self._due_s = self._flow.end_s + self._latency_s
        if self._is_taken:
            self._reschedule(self._due_s)
        elif self._is_awaited:
            self._wake()
        if self._waiting:
            self._await()

    def _await(self) -> None:
        free_s = self._free_s()
        if free_s < float("inf"):
            self._events.at(max(free_s, self._events.now_s), self._go, None)

    def _go(self, nothing: None) -> None:
        if self._waiting and self._free_s() <= self._events.now_s:  # else: rescheduled since
            self._begin(self._waiting.popleft())
            if self._waiting:
                self._await()

    def state(self, number: int, horizon_s: float) -> Place:
        waiting, there = places_of(self._waiting, number), places_of(self._there, number)
        if self._moving is None:
            return ((waiting, None, there, self._is_awaited), None) if self._is_awaited else None
        moving = self._moving[0] - number, self._moving[1]
        if self._due_s <= horizon_s:
            there = there if self._is_taken else (*there, moving)
            if not (waiting or there or self._is_awaited):
                return None
            return (waiting, None, there, self._is_awaited), None
        end_s = self._flow.end_s
        place = (waiting, (*moving, self._is_taken, end_s <= horizon_s), there, self._is_awaited)
        return place, end_s if end_s > horizon_s else self._due_s


AnyQueue: TypeAlias = MessageQueue | PredictedQueue

Lines: TypeAlias = Mapping[str, list[AnyQueue | None]]
"""A rank's lines by the kind of action that sends or takes, one for each replica of a stage; None
where it is not made yet. An empty list: there is no such stage."""


class Messages:
    """All lines of a run, each made when its first message is sent or waited for.

    Args:
        transfers: where those that have come are written down; None: they are not.
        wakes: of each rank, called when it may go on.
        reschedules: of each rank, called with the new time where a message that it counts on comes
            at another time; None: ranks count on no message that has not come.

    Attributes:
        takes: of each rank, lines to it.
        puts: of each rank, lines from it.
    """

    def __init__(
        self,
        workload: Workload,
        network: Network,
        sends: Sends,
        events: Events,
        flows: Flows,
        *,
        transfers: list[Transfer] | None,
        wakes: Sequence[Callable[[], None]],
        reschedules: Sequence[Callable[[float], None]] | None,
    ) -> None:
        plan = workload.plan
        self._plan, self._costs = plan, workload.stages
        self._network, self._sends = network, sends
        self._events, self._flows, self._transfers = events, flows, transfers
        self._wakes, self._reschedules = wakes, reschedules
        self._lines: dict[tuple[Cargo, int, int], AnyQueue] = {}
        stages = [stage for stage in range(plan.num_stages) for _ in plan.ranks_of(stage)]
        self.takes: list[Lines] = [
            {"F": self._none(stage - 1), "B": self._none(stage + 1)} for stage in stages
        ]
        self.puts: list[Lines] = [
            {"F": self._none(stage + 1), "B": self._none(stage - 1), "U": []} for stage in stages
        ]

    def _none(self, stage: int) -> list[AnyQueue | None]:
        """No line yet with the replicas of a stage."""
        if not 0 <= stage < self._plan.num_stages:
            return []
        return [None] * self._plan.replicas(stage)

    def line_to(self, rank: int, kind: str, replica: int) -> AnyQueue:
        """Makes the line on which a rank's forwards or backwards get what they need."""
        stage = self._plan.stage_of(rank) + (-1 if kind == "F" else 1)
        return self._make(kind, self._plan.rank_of(stage, replica), rank)

    def line_from(self, rank: int, kind: str, replica: int) -> AnyQueue:
        """Makes the line on which a rank's forwards or backwards hand on what they make."""
        stage = self._plan.stage_of(rank) + (1 if kind == "F" else -1)
        return self._make(kind, rank, self._plan.rank_of(stage, replica))

    def states(self, number: int, horizon_s: float) -> Iterator[tuple[object, Place]]:
        """The state of each line, by its cargo and its ends; see :data:`Place`."""
        for key, line in self._lines.items():
            yield key, line.state(number, horizon_s)

    def _make(self, kind: str, source: int, target: int) -> AnyQueue:
        plan = self._plan
        first = self._costs[min(plan.stage_of(source), plan.stage_of(target))]
        if kind == "F":
            line = self._made("activation", source, target, first.output_bytes)
        else:
            line = self._made("gradient", source, target, first.gradient_bytes)
        self.puts[source][kind][plan.replica_of(target)] = line
        self.takes[target][kind][plan.replica_of(source)] = line
        return line

    def _made(self, cargo: Cargo, source: int, target: int, size: float) -> AnyQueue:
        ports = self._network.ports(source, target)
        latency_s = self._network.latency_s(source, target)
        line: AnyQueue
        if self._reschedules is not None:
            line = PredictedQueue(
                self._events,
                self._flows,
                inbox=self._sends.inbox,
                ports=ports,
                latency_s=latency_s,
                num_bytes=size,
                wake=self._wakes[target],
                reschedule=self._reschedules[target],
            )
        else:
            line = MessageQueue(
                self._events,
                self._flows,
                self._sends,
                ports=ports,
                latency_s=latency_s,
                num_bytes=size,
                arrived=self._write_down(cargo, source, target, size),
                wake_source=self._wakes[source],
                wake_target=self._wakes[target],
            )
        self._lines[cargo, source, target] = line
        return line

    def _write_down(
        self, cargo: Cargo, source: int, target: int, size: float
    ) -> Callable[[Part, float, float], None] | None:
        transfers = self._transfers
        if transfers is None:
            return None

        def arrived(part: Part, start_s: float, end_s: float) -> None:
            transfers.append(Transfer(cargo, source, target, *part, start_s, end_s, size))

        return arrived
