"""The lines on which ranks send one another what forwards and backwards make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from sparsepipe.simulate.events import Events
from sparsepipe.simulate.flows import Flows
from sparsepipe.simulate.foresight import ForeseenLine
from sparsepipe.simulate.lines import Line, Part, Place
from sparsepipe.simulate.links import Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Cargo, Transfer
from sparsepipe.simulate.workload import Workload

AnyLine: TypeAlias = Line | ForeseenLine
Lines: TypeAlias = Mapping[str, list[AnyLine | None]]
"""Of a rank, by the kind of action that sends or takes: with each replica of another stage; None
where it is not made yet. An empty list: there is no such stage."""


class Messages:
    """All lines of a run, each made when its first message is sent or waited for.

    Args:
        workload: the plan, and what it sends.
        network: that ranks talk over.
        sends: how messages are handed over.
        events: in which they come.
        flows: that carry them.
        transfers: where those that have come are written down; None: they are not.
        wakes: of each rank, called when it may go on.
        settles: of each rank, called when what it counts on comes at another time, with that; None:
            ranks count on nothing that has not come.

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
        settles: Sequence[Callable[[float], None]] | None,
    ) -> None:
        plan = workload.plan
        self._plan, self._costs = plan, workload.stages
        self._network, self._sends = network, sends
        self._events, self._flows, self._transfers = events, flows, transfers
        self._wakes, self._settles = wakes, settles
        self._lines: dict[tuple[Cargo, int, int], AnyLine] = {}
        stages = [stage for stage in range(plan.num_stages) for _ in plan.ranks_of(stage)]
        self.takes: list[Lines] = [
            {"F": self._none(stage - 1), "B": self._none(stage + 1)} for stage in stages
        ]
        self.puts: list[Lines] = [
            {"F": self._none(stage + 1), "B": self._none(stage - 1), "U": []} for stage in stages
        ]

    def _none(self, stage: int) -> list[AnyLine | None]:
        """No line yet with the replicas of a stage."""
        if not 0 <= stage < self._plan.num_stages:
            return []
        return [None] * self._plan.replicas(stage)

    def line_to(self, rank: int, kind: str, replica: int) -> AnyLine:
        """Makes the line on which a rank's forwards or backwards get what they need.

        Args:
            rank: the receiver.
            kind: of the action.
            replica: of the stage before or behind.
        """
        stage = self._plan.stage_of(rank) + (-1 if kind == "F" else 1)
        return self._make(kind, self._plan.rank_of(stage, replica), rank)

    def line_from(self, rank: int, kind: str, replica: int) -> AnyLine:
        """Makes the line on which a rank's forwards or backwards hand on what they make.

        Args:
            rank: the sender.
            kind: of the action.
            replica: of the stage behind or before.
        """
        stage = self._plan.stage_of(rank) + (1 if kind == "F" else -1)
        return self._make(kind, rank, self._plan.rank_of(stage, replica))

    def standings(self, number: int, soon_s: float) -> Iterator[tuple[object, Place]]:
        """Of each line, by its cargo and its ends; see :data:`~sparsepipe.simulate.lines.Place`."""
        for key, line in self._lines.items():
            yield key, line.standing(number, soon_s)

    def _make(self, kind: str, source: int, target: int) -> AnyLine:
        plan = self._plan
        first = self._costs[min(plan.stage_of(source), plan.stage_of(target))]
        if kind == "F":
            line = self._made("activation", source, target, first.output_bytes)
        else:
            line = self._made("gradient", source, target, first.gradient_bytes)
        self.puts[source][kind][plan.replica_of(target)] = line
        self.takes[target][kind][plan.replica_of(source)] = line
        return line

    def _made(self, cargo: Cargo, source: int, target: int, size: float) -> AnyLine:
        ports = self._network.ports(source, target)
        latency_s = self._network.latency_s(source, target)
        line: AnyLine
        if self._settles is not None:
            line = ForeseenLine(
                self._events,
                self._flows,
                inbox=self._sends.inbox,
                ports=ports,
                latency_s=latency_s,
                num_bytes=size,
                wake=self._wakes[target],
                settle=self._settles[target],
            )
        else:
            line = Line(
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
