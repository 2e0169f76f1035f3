"""The discrete-event simulator: runs the schedule of a pipeline with costs in place of tensors.

A rank runs its actions in order. A forward waits for its activation, a backward for its gradient,
an update for the sum of gradients over the stage's replicas. Messages and sums share the links and
take place while ranks compute. A rank sends gradients upstream before it waits for that sum.

What a rank does next follows from the state of the run: what each rank does or waits for, and where
each message and each sum is. The part between two equal states therefore repeats until no more
minibatches come, and its repetitions need not be simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Action, MinibatchSupply, Plan, Schedule, Span, check
from sparsepipe.simulate.flows import EventQueue, Flows
from sparsepipe.simulate.messages import Messages
from sparsepipe.simulate.network import AS_IN_TRAINING, Algorithm, ClusterNetwork, Sends
from sparsepipe.simulate.ranks import OlderWeightsInUse, Rank, WeightsInUse
from sparsepipe.simulate.sums import Sums
from sparsepipe.simulate.workload import Workload

EQUAL = 1e-9
"""Times count as equal if they differ by at most this share of the length of a cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How ranks communicate.

    Args:
        network: hosts of the ranks and the links between them.
        sends: how many messages may wait between two ranks.
        algorithm: how replicas sum their gradients, as in :func:`.network.reduction_legs`.
        bucket_bytes: bytes of gradients in each part of a sum that overlaps with the backward pass;
            None: sums follow the backward pass.
    """

    network: ClusterNetwork
    sends: Sends = AS_IN_TRAINING
    algorithm: Algorithm = "ordered"
    bucket_bytes: float | None = None


@dataclass(slots=True, kw_only=True)
class Record:
    """The times of a run, in seconds from its beginning.

    Attributes:
        plan: the stages and their ranks.
        minibatches: number of simulated minibatches.
        end_s: end of the last action.
        busy_s: seconds that each rank spent in forwards, backwards and updates.
        returns_s: by minibatch, the end of its last backward in stage 0.
        spans: actions, rank by rank and in order.
        transfers: messages, in the order of their arrival.
        reductions: sums of gradients, in the order of their ends.
    """

    plan: Plan
    minibatches: int
    end_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    reductions: list[Span] = field(default_factory=list)

    @property
    def all_spans(self) -> list[Span]:
        """Spans of all actions, messages and sums."""
        return [*self.spans, *self.transfers, *self.reductions]


class Engine:
    """Simulates one run.

    Args:
        workload: the plan and its costs.
        actions: for each rank, its actions in order.
        setting: how ranks communicate.
        keep: whether spans, transfers and reductions are recorded.
        detector: detects a cycle and skips its repetitions; None: all minibatches are simulated.
    """

    def __init__(
        self,
        workload: Workload,
        actions: Sequence[Iterable[Action]],
        setting: Setting,
        *,
        keep: bool,
        detector: CycleDetector | None,
    ) -> None:
        plan = self._plan = workload.plan
        self._detector = detector
        record = self.record = Record(plan=plan, minibatches=0)
        self._events = EventQueue()
        self._flows = Flows(self._events, setting.network.bytes_per_s)

        def wake(rank: int) -> None:
            self._ranks[rank].go_on()

        self._messages = Messages(
            workload,
            setting.network,
            setting.sends,
            self._events,
            self._flows,
            transfers=record.transfers if keep else None,
            wake=wake,
        )
        # By stage; None: the stage has nothing to sum, and no rank waits, as in training.
        self._sums = [
            Sums(
                self._events,
                self._flows,
                setting.network,
                costs,
                plan.ranks_of(stage),
                algorithm=setting.algorithm,
                bucket_bytes=setting.bucket_bytes,
                spans=record.reductions if keep else None,
                wake=wake,
            )
            if plan.replicas(stage) > 1 and costs.parameter_bytes
            else None
            for stage, costs in enumerate(workload.stages)
        ]
        self._spans: list[list[Span]] = [[] for _ in actions]
        self._ranks = [
            self._rank(workload, number, own, keep=keep) for number, own in enumerate(actions)
        ]
        self._working = [rank for rank in self._ranks if rank.action is not None]
        first = [rank.action for rank in self._working]
        self._is_split = any(a is not None and a.microbatch is not None for a in first)
        self._seen = 0, 0.0  # first minibatch and time of the first rank's last update

    def _rank(
        self, workload: Workload, number: int, actions: Iterable[Action], *, keep: bool
    ) -> Rank:
        stage = self._plan.stage_of(number)
        costs, replica = workload.stages[stage], self._plan.replica_of(number)
        weights: WeightsInUse | None = None
        if costs.copy_s:
            vertical = workload.vertical_sync
            weights = OlderWeightsInUse(self._plan, number) if vertical else WeightsInUse()
        return Rank(
            self._events,
            number,
            actions,
            seconds={
                "F": costs.forward_s[replica],
                "B": costs.backward_s[replica],
                "U": costs.update_s,
            },
            copy_s=costs.copy_s,
            weights=weights,
            messages=self._messages,
            sums=self._sums[stage],
            spans=self._spans[number] if keep else None,
            updates=self._begin_update if number == 0 and self._detector is not None else None,
            returned=self._return,
        )

    def run(self) -> Record:
        """Simulates all actions; raises a ScheduleError if ranks wait for each other forever."""
        for rank in self._ranks:
            rank.go_on()
        self._events.run()
        if stuck := [
            f"rank {number} before {rank.action}"
            for number, rank in enumerate(self._ranks)
            if rank.action is not None
        ]:
            raise ScheduleError(
                f"deadlock: {', '.join(stuck[:8])} would wait forever",
                remedy="let more messages wait (outbox, inbox), or choose another schedule",
            )
        # The last event may have had no effect and come later.
        self.record.end_s = max(rank.since_s for rank in self._ranks)
        self.record.busy_s = [rank.busy_s for rank in self._ranks]
        self.record.spans = [span for spans in self._spans for span in spans]
        return self.record

    def _return(self, minibatch: int) -> None:
        returns_s = self.record.returns_s
        returns_s.extend([0.0] * (minibatch + 1 - len(returns_s)))
        returns_s[minibatch] = self._events.now_s
        self.record.minibatches = len(returns_s)

    def _begin_update(self, action: Action) -> None:
        assert self._detector is not None
        number, now_s = self._first_minibatch(0, action), self._events.now_s
        if self._detector.needs_state(number, now_s):
            self._seen = number, now_s
            self._events.before_time_goes_on(self._look)

    def _look(self) -> None:
        """Passes the state of the run to the detector once nothing else happens at this time."""
        assert self._detector is not None
        if any(rank.action is None for rank in self._working):
            return  # the run comes to its end
        number, time_s = self._seen
        self._flows.update_rates()
        next_s = self._events.heap[0][0] if self._events.heap else float("inf")
        if next_s <= self._events.now_s + EQUAL * time_s / (number + 1):
            self._events.before_time_goes_on(self._look)
            return
        places: list[object] = []
        ends_s: list[float] = []
        for place, rank in enumerate(self._ranks):
            action = rank.action
            if action is not None:
                turn = self._first_minibatch(place, action) - number
                places.append((place, turn, action.kind, action.microbatch, rank.state))
                ends_s += [] if rank.end_s is None else [rank.end_s]
        for key, state in self._messages.states(number):
            places.append((key, state[0]))
            ends_s += state[1]
        for stage, sums in enumerate(self._sums):
            if sums is not None:
                first = number if self._is_split else number // self._plan.replicas(stage)
                state = sums.state(first)
                places.append((stage, state[0]))
                ends_s += state[1]
        since_s = tuple(end_s - time_s for end_s in ends_s)
        busy_s = tuple(rank.busy_s for rank in self._ranks)
        self._detector.add_state(RunState(number, time_s, tuple(places), since_s, busy_s))

    def _first_minibatch(self, rank: int, action: Action) -> int:
        """The minibatch of an action; for an update, the first one whose gradient it applies."""
        if action.kind != "U" or self._is_split:
            return action.number
        return action.number * self._plan.replicas(self._plan.stage_of(rank))


def simulate(schedule: Schedule, workload: Workload, setting: Setting) -> Record:
    """Simulates a schedule to its end and records all spans.

    If the schedule splits minibatches, ``workload`` has the costs per microbatch.
    """
    check(schedule)
    return Engine(workload, schedule.actions, setting, keep=True, detector=None).run()


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run when the first rank begins an update.

    Attributes:
        number: first minibatch whose gradient that update applies.
        time_s: seconds from the beginning of the run to that of the update.
        places: what each rank does or waits for, and where each message and each sum is, with
            minibatches counted from ``number``.
        ends_s: seconds from ``time_s`` to the end of each action, message and sum under way.
        busy_s: seconds that each rank has computed until ``time_s``.
    """

    number: int
    time_s: float
    places: tuple[object, ...]
    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The part of a run that repeats.

    Attributes:
        minibatches: number of minibatches after which the run has the same state again.
        seconds: seconds that these minibatches take.
        busy: share of these seconds in which each rank computes, by rank.
    """

    minibatches: int
    seconds: float
    busy: tuple[float, ...]


class CycleDetector:
    """Detects that a run repeats itself, and skips the repetitions.

    Once the intervals between updates repeat, the detector compares the states of the run at the
    beginning and the end of one repetition. If they are equal, it takes whole cycles off the supply
    of minibatches, so that the run soon drains.

    Args:
        supply: supplies the minibatches of the run.
        period: number of minibatches after which the turns of the replicas of all stages repeat.
    """

    def __init__(self, supply: MinibatchSupply, period: int) -> None:
        self._supply, self._period = supply, period
        self._begins_s: list[float] = []  # times of the first rank's update, once a period
        self._next = 3  # number of periods after which to look for a cycle
        self._cycle = 0  # number of minibatches after which the times of updates repeat
        self._first: RunState | None = None  # at the beginning of what may be a cycle
        self._due: int | None = None  # minibatch at whose update the state is needed
        self.cycle: Cycle | None = None

    def needs_state(self, number: int, time_s: float) -> bool:
        """Whether the detector needs the state at ``time_s``, when rank 0 begins the update whose
        first minibatch is ``number``. States do not recur before each rank has run a backward; by
        the third period all have.
        """
        if self.cycle is not None or number % self._period:
            return False
        self._begins_s.append(time_s)
        if self._due is None and len(self._begins_s) >= self._next:
            if (periods := repetition(self._begins_s)) is None:
                self._look_later()
            else:
                self._due, self._cycle = number, periods * self._period
        return number == self._due

    def add_state(self, state: RunState) -> None:
        """Receives the state of the run after :meth:`needs_state` has returned True."""
        if (first := self._first) is None:
            self._first, self._due = state, state.number + self._cycle
            return
        seconds = state.time_s - first.time_s
        is_same = state.places == first.places and all(
            abs(now_s - then_s) <= EQUAL * seconds
            for now_s, then_s in zip(state.ends_s, first.ends_s, strict=True)
        )
        if not is_same:
            self._first = self._due = None
            self._look_later()
            return
        busy_s = zip(state.busy_s, first.busy_s, strict=True)
        self.cycle = Cycle(
            minibatches=self._cycle,
            seconds=seconds,
            busy=tuple(min(1.0, (b - a) / seconds) if seconds else 0.0 for b, a in busy_s),
        )
        announced = self._supply.announced
        self._supply.limit = announced + (self._supply.limit - announced) % self._cycle

    def _look_later(self) -> None:
        self._next = len(self._begins_s) + max(1, len(self._begins_s) // 16)


def repetition(times_s: list[float]) -> int | None:
    """Number of entries after which the last intervals of ``times_s`` repeat; None: they do not."""
    last = len(times_s) - 1
    for cycle in range(1, last // 2 + 1):
        took_s = times_s[last] - times_s[last - cycle]
        if all(
            abs(times_s[k] - times_s[k - cycle] - took_s) <= EQUAL * took_s
            for k in range(last - 1, last - 1 - cycle, -1)
        ):
            return cycle
    return None
