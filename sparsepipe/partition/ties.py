"""Which of several plans with the same bottleneck is the best one.

Times that differ by a billionth count as equal. Of plans whose slowest stage or transfer is
equal, those with the fewest stages are better; of these, those whose second-worst stage takes
less time; of these, the one whose text comes first, stage by stage.

Shape suffixes: V nodes of the lattice; I places a model can be cut at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparsepipe.partition.costs import Bools, Costs, Ints
from sparsepipe.partition.fleet import Counts, Kind
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.windows import Masks, Windows

EQUAL = 1e-9
"""Times that differ by this share are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A stage.

    Attributes:
        first: its first layer.
        end: the first layer of the next stage.
        counts: its devices of each kind.
    """

    first: int
    end: int
    counts: Counts

    def text(self, kinds: tuple[Kind, ...]) -> str:
        """Its layers and devices, such as ``0-23 on 4 x RTX 2080 Ti + 1 x TITAN V``."""
        return f"{self.first}-{self.end - 1} on {devices_text(self.counts, kinds)}"


def devices_text(counts: Counts, kinds: tuple[Kind, ...]) -> str:
    """Devices in words; with the host where several have the same model."""
    names = [kind.name for kind in kinds]
    return " + ".join(
        f"{count} x {kind.name}" + (f" of {kind.host}" if names.count(kind.name) > 1 else "")
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )


def best_tied(costs: Costs, windows: Windows | Masks, bottleneck_s: float) -> list[Choice]:
    """The best of the plans with a bottleneck that some plan reaches."""
    bound_s = bottleneck_s * (1 + EQUAL)
    levels = _live(costs, windows, bound_s, _fewest(costs, windows, bound_s))
    rest = _Rest(costs, levels, bound_s)
    return rest.plan()


def _fewest(costs: Costs, windows: Windows | Masks, bound_s: float) -> list[Bools]:
    """Places reached after 0, 1, ... stages, by node, until a plan is whole."""
    lattice = costs.lattice
    begin_VI = np.zeros((len(lattice.nodes), costs.spans.num_layers + 1), dtype=np.bool_)
    begin_VI[0, 0] = True
    levels = [begin_VI]
    while not levels[-1][lattice.last, -1].any():
        reached_VI = np.zeros_like(begin_VI)
        for node in range(1, len(lattice.nodes)):
            reached_VI[node] = windows.arrive(node, bound_s, levels[-1])
        levels.append(reached_VI)
    return levels


def _live(
    costs: Costs, windows: Windows | Masks, bound_s: float, levels: list[Bools]
) -> list[Bools]:
    """Of the places reached, those from which a plan of so many stages becomes whole."""
    lattice = costs.lattice
    targets_VI = np.zeros_like(levels[-1])
    targets_VI[lattice.last, -1] = levels[-1][lattice.last, -1]
    live = [targets_VI]
    for reached_VI in reversed(levels[:-1]):
        before_VI = np.zeros_like(reached_VI)
        for node in np.flatnonzero(live[0].any(axis=1)):
            begins_EI = windows.depart(int(node), bound_s, live[0][node])
            np.logical_or.at(before_VI, lattice.ways[node].sources_E, begins_EI)
        live.insert(0, before_VI & reached_VI)
    return live


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Block:
    """Times of the stages that lead from some places to others in one way."""

    node: int
    way: int
    source: int
    begins: Ints
    ends: Ints
    times: Floats


class _Rest:
    """What the best rest of a plan costs, from each place after each number of stages."""

    def __init__(self, costs: Costs, levels: list[Bools], bound_s: float) -> None:
        self._costs, self._levels, self._bound_s = costs, levels, bound_s
        unknown_VI = np.full(levels[0].shape, np.inf)
        self._worst = [unknown_VI.copy() for _ in levels]
        self._second = [unknown_VI.copy() for _ in levels]
        self._worst[-1][levels[-1]] = self._second[-1][levels[-1]] = 0.0
        for level in reversed(range(len(levels) - 1)):
            for block in self._blocks(level):
                self._meet(level, block)

    def _blocks(self, level: int) -> Iterator[_Block]:
        after_VI, before_VI = self._levels[level + 1], self._levels[level]
        for node in np.flatnonzero(after_VI.any(axis=1)):
            for way, source in enumerate(self._costs.lattice.ways[node].sources_E):
                if before_VI[source].any():
                    yield self._block(level, int(node), way, before_VI[source])

    def _block(self, level: int, node: int, way: int, begins_I: Bools) -> _Block:
        begins = np.flatnonzero(begins_I)
        ends = np.flatnonzero(self._levels[level + 1][node])
        return _Block(
            node=node,
            way=way,
            source=int(self._costs.lattice.ways[node].sources_E[way]),
            begins=begins,
            ends=ends,
            times=self._costs.times_s(node, way, begins, ends, self._bound_s),
        )

    def _meet(self, level: int, block: _Block) -> None:
        worst = self._worst[level + 1][block.node, block.ends]
        second = self._second[level + 1][block.node, block.ends]
        allowed = np.isfinite(block.times)
        # The stage may be the slowest one, and then it is not the second-worst.
        as_worst = np.where(allowed, worst, np.inf)
        rest = np.minimum(np.maximum(block.times, second), as_worst).min(axis=1)
        all_ = np.maximum(block.times, worst).min(axis=1)
        place = block.source, block.begins
        self._second[level][place] = np.minimum(self._second[level][place], rest)
        self._worst[level][place] = np.minimum(self._worst[level][place], all_)

    def plan(self) -> list[Choice]:
        """From the front, the stage whose text comes first and that ends in a best plan."""
        limit_s = float(self._second[0][0, 0]) * (1 + EQUAL)
        node, place, spare = 0, 0, True
        chosen = []
        for level in range(len(self._levels) - 1):
            options = self._options(level, node, place, spare, limit_s)
            choice, node, spare = min(
                options, key=lambda option: option[0].text(self._costs.lattice.kinds)
            )
            place = choice.end
            chosen.append(choice)
        return chosen

    def _options(
        self, level: int, node: int, place: int, spare: bool, limit_s: float
    ) -> Iterator[tuple[Choice, int, bool]]:
        """Stages from here on, where they lead, and whether one may still exceed the limit."""
        begins_I = np.zeros(self._levels[0].shape[1], dtype=np.bool_)
        begins_I[place] = True
        for after in np.flatnonzero(self._levels[level + 1].any(axis=1)):
            ways = self._costs.lattice.ways[after]
            for way in np.flatnonzero(ways.sources_E == node):
                block = self._block(level, int(after), int(way), begins_I)
                counts = tuple(int(n) for n in ways.counts_EK[way])
                for end, time_s in zip(block.ends, block.times[0], strict=True):
                    keeps = spare and time_s <= limit_s
                    following = self._second if keeps else self._worst
                    enough = following[level + 1][after, end] <= limit_s
                    if np.isfinite(time_s) and enough and (spare or time_s <= limit_s):
                        choice = Choice(first=place, end=int(end), counts=counts)
                        yield choice, int(after), keeps
