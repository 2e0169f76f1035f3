"""Runs ranks through their actions, message by message: the discrete-event simulator.

What the pipeline's worker does, on costs: a rank takes its actions in order; a forward waits for
the activation, a backward for the gradient, an update for the sum over the replicas; messages and
sums are on their way while ranks compute, on links that they share. A gradient goes upstream
before the replicas meet. An update copies weights first where a minibatch in flight needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.lines import Line, Part
from sparsepipe.simulate.links import Algorithm, Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Cargo, Record, Reduction, Transfer
from sparsepipe.simulate.standing import EQUAL, Lookout, Standing
from sparsepipe.simulate.stash import Stash
from sparsepipe.simulate.sums import Sums
from sparsepipe.simulate.workload import Workload


class Engine:
    """One run.

    Args:
        workload: the plan, and what it costs.
        actions: of each rank, in order; told as they are needed.
        network: that ranks talk over.
        sends: how messages are handed over.
        algorithm: of sums over replicas.
        bucket_bytes: sums begin while the backward runs, in parts of at least so many bytes
            (DDP's buckets); None: with the update, in one part.
        keep: whether spans, transfers and reductions are recorded.
        lookout: is told where the run stands, when it wants to know.
    """

    def __init__(
        self,
        workload: Workload,
        actions: Sequence[Iterable[Action]],
        network: Network,
        *,
        sends: Sends,
        algorithm: Algorithm,
        bucket_bytes: float | None,
        keep: bool,
        lookout: Lookout | None = None,
    ) -> None:
        plan = workload.plan
        self._keep, self._lookout = keep, lookout
        self._events = Events()
        self._flows = Flows(self._events, network.bytes_per_s)
        self._network, self._workload, self._sends = network, workload, sends
        self._waits_to_send = sends.outbox is not None
        self._sums_early = bucket_bytes is not None
        self._ranks_of = [plan.ranks_of(stage) for stage in range(plan.num_stages)]
        self._stages = [stage for stage, ranks in enumerate(self._ranks_of) for _ in ranks]
        costs = workload.stages
        self._seconds = {
            "F": [seconds for stage in costs for seconds in stage.forward_s],
            "B": [seconds for stage in costs for seconds in stage.backward_s],
            "U": [
                stage.update_s
                for stage, own in zip(costs, self._ranks_of, strict=True)
                for _ in own
            ],
        }
        self._copy_s = [costs[stage].copy_s for stage in self._stages]
        self._stashes = [Stash() for _ in self._stages]
        self._todo = [iter(each) for each in actions]
        self._next = [next(each, None) for each in self._todo]
        self._is_split = any(a is not None and a.microbatch is not None for a in self._next)
        self._ends_s: list[float | None] = [None] * plan.num_ranks  # of those that compute
        # By sender or receiver: the line of a cargo to or from a replica of another stage.
        self._puts: list[dict[int, Line]] = [{} for _ in range(plan.num_ranks)]
        self._takes: list[dict[int, Line]] = [{} for _ in range(plan.num_ranks)]
        self._lines: dict[tuple[Cargo, int, int], Line] = {}
        self._sending: list[Line | None] = [None] * plan.num_ranks  # on which each sent last
        self._seen = 0, 0.0  # the last update of the first rank: its first minibatch, and when
        self.record = Record(plan=plan, minibatches=0, busy_s=[0.0] * plan.num_ranks)
        self._spans: list[list[Span]] = [[] for _ in range(plan.num_ranks)]
        self._sums = [
            Sums(
                self._events,
                self._flows,
                network,
                costs[stage],
                ranks,
                algorithm=algorithm,
                bucket_bytes=bucket_bytes,
                summed=lambda number, part, start_s, size, stage=stage: self._summed(  # type: ignore[misc]
                    Reduction(stage, number, part, start_s, self._events.now_s, size)
                ),
                wake=self._go_on,
            )
            for stage, ranks in enumerate(self._ranks_of)
        ]

    def run(self) -> Record:
        """Lets everything happen.

        Raises:
            ScheduleError: ranks wait for one another for ever.
        """
        for rank in range(len(self._todo)):
            self._go_on(rank)
        self._events.run()
        if stuck := [
            f"rank {rank} at {action}"
            for rank, action in enumerate(self._next)
            if action is not None
        ]:
            raise ScheduleError(
                f"deadlock: {'; '.join(stuck[:8])} would wait for ever",
                remedy="let lines hold more messages (outbox, inbox), or choose another schedule",
            )
        self.record.spans = [span for spans in self._spans for span in spans]
        return self.record

    def _go_on(self, rank: int) -> None:
        """Begins the next action of a rank, if it is free and has what that needs."""
        action = self._next[rank]
        if action is None or self._ends_s[rank] is not None:
            return
        if self._waits_to_send and self._is_held_up(rank):
            return
        kind = action.kind
        if kind == "U":
            has_input = self._sums[self._stages[rank]].reached(rank, action.number)
        else:
            has_input = self._has_message(rank, action)
        if not has_input:
            return
        now_s, seconds = self._events.now_s, self._seconds[kind][rank]
        if kind == "U" and self._stashes[rank].in_use:
            seconds += self._copy_s[rank]
        if kind == "U" and not seconds:
            self._done(rank, action, now_s)
            self._go_on(rank)
            return
        if self._sums_early and kind == "B":
            self._sums[self._stages[rank]].backward_begins(rank, action.number)
        self._ends_s[rank] = end_s = now_s + seconds
        self._events.at(end_s, self._end, (rank, action, now_s))

    def _has_message(self, rank: int, action: Action) -> bool:
        """Whether what an action needs is there; if not, the rank is woken later."""
        forward = action.kind == "F"
        source = self._stages[rank] + (-1 if forward else 1)
        if not 0 <= source < len(self._ranks_of):
            return True
        number, microbatch = action.number, action.microbatch
        ranks = self._ranks_of[source]
        replica = (number if microbatch is None else microbatch) % len(ranks)
        line = self._takes[rank].get(2 * replica + forward)
        if line is None:
            line = self._line("activation" if forward else "gradient", ranks[replica], rank)
        return line.take((number, microbatch))

    def _is_held_up(self, rank: int) -> bool:
        """Whether what a rank has sent must go on its way before it does anything else."""
        line = self._sending[rank]
        return line is not None and line.is_full

    def _end(self, what: tuple[int, Action, float]) -> None:
        rank, action, start_s = what
        self._ends_s[rank] = None
        self.record.busy_s[rank] += self._events.now_s - start_s
        self._done(rank, action, start_s)
        if action.kind != "U":
            self._send(rank, action)
        self._go_on(rank)

    def _done(self, rank: int, action: Action, start_s: float) -> None:
        """Notes an action that is over, and which one comes next."""
        if self._copy_s[rank]:
            self._stashes[rank].see(action)
        # Of all actions the last to be noted ends the run; the queue's last call may be void.
        self.record.end_s = self._events.now_s
        if self._keep:
            self._spans[rank].append(Span(rank, action, start_s, self._events.now_s))
        if rank == 0 and action.kind == "U" and self._lookout is not None:
            now_s, number = self._events.now_s, self._turn(rank, action)
            if self._lookout.wants(number, now_s):
                self._seen = number, now_s
                self._events.before_time_goes_on(self._look)
        self._next[rank] = next(self._todo[rank], None)

    def _send(self, rank: int, action: Action) -> None:
        """Hands on what a forward or a backward has made."""
        forward = action.kind == "F"
        target = self._stages[rank] + (1 if forward else -1)
        if not 0 <= target < len(self._ranks_of):
            if not forward:
                self._returned(action.number)
            return
        number, microbatch = action.number, action.microbatch
        ranks = self._ranks_of[target]
        replica = (number if microbatch is None else microbatch) % len(ranks)
        line = self._puts[rank].get(2 * replica + forward)
        if line is None:
            line = self._line("activation" if forward else "gradient", rank, ranks[replica])
        self._sending[rank] = line
        line.put((number, microbatch))

    def _returned(self, minibatch: int) -> None:
        returns_s = self.record.returns_s
        returns_s.extend([0.0] * (minibatch + 1 - len(returns_s)))
        returns_s[minibatch] = self._events.now_s
        self.record.minibatches = len(returns_s)

    def _line(self, cargo: Cargo, source: int, target: int) -> Line:
        """Makes a line when its first message is sent or waited for."""
        first, forward = min(self._stages[source], self._stages[target]), cargo == "activation"
        costs = self._workload.stages[first]
        size = costs.output_bytes if forward else costs.gradient_bytes

        def arrived(part: Part, start_s: float, end_s: float) -> None:
            moved = Transfer(cargo, source, target, *part, start_s, end_s, size)
            self.record.transfers.append(moved)

        line = Line(
            self._events,
            self._flows,
            self._sends,
            ports=self._network.ports(source, target),
            latency_s=self._network.latency_s(source, target),
            num_bytes=size,
            arrived=arrived if self._keep else None,
            wake_source=partial(self._go_on, source),
            wake_target=partial(self._go_on, target),
        )
        self._lines[cargo, source, target] = line
        here, there = (self._ranks_of[self._stages[rank]].start for rank in (source, target))
        self._puts[source][2 * (target - there) + forward] = line
        self._takes[target][2 * (source - here) + forward] = line
        return line

    def _summed(self, reduction: Reduction) -> None:
        if self._keep:
            self.record.reductions.append(reduction)

    def _look(self) -> None:
        """Tells the lookout where the run stands, once nothing else is about to happen."""
        assert self._lookout is not None
        number, time_s = self._seen
        if self._events.next_s - self._events.now_s <= EQUAL * time_s / (number + 1):
            self._events.before_time_goes_on(self._look)
            return
        self._flows.settle()
        self._lookout.sees(self._standing(number, time_s))

    def _standing(self, number: int, time_s: float) -> Standing:
        places: list[object] = []
        ends_s: list[float] = []
        for rank, action in enumerate(self._next):
            end_s = self._ends_s[rank]
            turn = None if action is None else self._turn(rank, action) - number
            part = None if action is None else (action.kind, action.microbatch)
            places.append((turn, part, end_s is None, self._is_held_up(rank)))
            ends_s += [] if end_s is None else [end_s]
        for key in sorted(self._lines):
            if (stands := self._lines[key].standing(number)) is not None:
                places.append((key, stands[0]))
                ends_s += [] if stands[1] is None else [stands[1]]
        for stage, sums in enumerate(self._sums):
            first = number if self._is_split else number // len(self._ranks_of[stage])
            place, due_s = sums.standing(first)
            places.append((stage, place))
            ends_s += due_s
        since_s = tuple(end_s - time_s for end_s in ends_s)
        return Standing(number, time_s, tuple(places), since_s, tuple(self.record.busy_s))

    def _turn(self, rank: int, action: Action) -> int:
        """The minibatch of an action; of an update the first of its minibatches."""
        if action.kind != "U" or self._is_split:
            return action.number
        return action.number * len(self._ranks_of[self._stages[rank]])
