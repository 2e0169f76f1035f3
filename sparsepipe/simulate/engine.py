"""Runs ranks through their actions, message by message: the discrete-event simulator.

What the pipeline's worker does, on costs: a rank takes its actions in order; a forward waits for
the activation, a backward for the gradient, an update for the sum over the replicas; messages and
sums are on their way while ranks compute, on links that they share. A gradient goes upstream
before the replicas meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.lines import Line, Part
from sparsepipe.simulate.links import Algorithm, Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Cargo, Record, Reduction, Transfer
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
    ) -> None:
        plan = workload.plan
        self._keep = keep
        self._events = Events()
        self._flows = Flows(self._events, network.bytes_per_s)
        self._network, self._workload, self._sends = network, workload, sends
        self._stages = [stage for stage in range(plan.num_stages) for _ in plan.ranks_of(stage)]
        self._ranks_of = [plan.ranks_of(stage) for stage in range(plan.num_stages)]
        self._todo = [iter(each) for each in actions]
        self._next = [next(each, None) for each in self._todo]
        self._computes = [False] * plan.num_ranks
        self._lines: dict[tuple[Cargo, int, int], Line] = {}
        self._sending: list[Line | None] = [None] * plan.num_ranks
        self.record = Record(plan=plan, minibatches=0, busy_s=[0.0] * plan.num_ranks)
        self._spans: list[list[Span]] = [[] for _ in range(plan.num_ranks)]
        self._sums = [
            Sums(
                self._events,
                self._flows,
                network,
                workload.stages[stage],
                self._ranks_of[stage],
                algorithm=algorithm,
                bucket_bytes=bucket_bytes,
                summed=lambda number, part, start_s, size, stage=stage: self._summed(  # type: ignore[misc]
                    Reduction(stage, number, part, start_s, self._events.now_s, size)
                ),
                wake=self._go_on,
            )
            for stage in range(plan.num_stages)
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
        self.record.end_s = self._events.now_s
        self.record.spans = [span for spans in self._spans for span in spans]
        return self.record

    def _go_on(self, rank: int) -> None:
        """Begins the next action of a rank, if it is free and has what that needs."""
        action = self._next[rank]
        if action is None or self._computes[rank] or self._is_held_up(rank):
            return
        stage = self._stages[rank]
        if action.kind == "U":
            if self._sums[stage].reached(rank, action.number):
                self._begin(rank, action, self._workload.stages[stage].update_s)
            return
        forward = action.kind == "F"
        source = stage - 1 if forward else stage + 1
        if 0 <= source < len(self._ranks_of):
            cargo: Cargo = "activation" if forward else "gradient"
            line = self._line(cargo, self._rank_for(source, action), rank)
            if not line.take((action.number, action.microbatch)):
                return
        costs = self._workload.stages[stage]
        place = rank - self._ranks_of[stage].start
        if not forward:
            self._sums[stage].backward_begins(rank, action.number)
        self._begin(rank, action, (costs.forward_s if forward else costs.backward_s)[place])

    def _is_held_up(self, rank: int) -> bool:
        line = self._sending[rank]
        if line is not None and line.is_full:
            return True
        self._sending[rank] = None
        return False

    def _begin(self, rank: int, action: Action, seconds: float) -> None:
        self._computes[rank] = True
        now_s = self._events.now_s
        self._events.at(now_s + seconds, self._end, (rank, action, now_s))

    def _end(self, done: tuple[int, Action, float]) -> None:
        rank, action, start_s = done
        now_s = self._events.now_s
        self.record.busy_s[rank] += now_s - start_s
        if self._keep:
            self._spans[rank].append(Span(rank, action, start_s, now_s))
        self._computes[rank] = False
        self._next[rank] = next(self._todo[rank], None)
        stage = self._stages[rank]
        if action.kind == "F" and stage + 1 < len(self._ranks_of):
            self._send("activation", rank, stage + 1, action)
        elif action.kind == "B":
            if stage:
                self._send("gradient", rank, stage - 1, action)
            else:
                self._returned(action)
        self._go_on(rank)

    def _returned(self, action: Action) -> None:
        returns_s = self.record.returns_s
        returns_s.extend([0.0] * (action.number + 1 - len(returns_s)))
        returns_s[action.number] = self._events.now_s
        self.record.minibatches = len(returns_s)

    def _send(self, cargo: Cargo, rank: int, stage: int, action: Action) -> None:
        line = self._line(cargo, rank, self._rank_for(stage, action))
        self._sending[rank] = line
        line.put((action.number, action.microbatch))

    def _rank_for(self, stage: int, action: Action) -> int:
        ranks = self._ranks_of[stage]
        return ranks.start + action.turn % len(ranks)

    def _line(self, cargo: Cargo, source: int, target: int) -> Line:
        key = cargo, source, target
        if key not in self._lines:
            costs = self._workload.stages[min(self._stages[source], self._stages[target])]
            size = costs.output_bytes if cargo == "activation" else costs.gradient_bytes

            def arrived(part: Part, start_s: float, end_s: float) -> None:
                if self._keep:
                    moved = Transfer(cargo, source, target, *part, start_s, end_s, size)
                    self.record.transfers.append(moved)

            self._lines[key] = Line(
                self._events,
                self._flows,
                self._sends,
                ports=self._network.ports(source, target),
                latency_s=self._network.latency_s(source, target),
                num_bytes=size,
                arrived=arrived,
                wake_source=lambda: self._go_on(source),
                wake_target=lambda: self._go_on(target),
            )
        return self._lines[key]

    def _summed(self, reduction: Reduction) -> None:
        if self._keep:
            self.record.reductions.append(reduction)
