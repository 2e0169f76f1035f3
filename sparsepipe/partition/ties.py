"""Which of several plans with the same bottleneck is the best one.

Times that differ by a billionth count as equal. Of plans whose slowest stage or transfer is
equal, those with the fewest stages are better; of these, those whose second-worst stage takes
less time; of these, the one whose text comes first, stage by stage. (``exact`` leaves hosts that
make no difference out of the text, see ``alike.py``.)

Shape suffixes: V nodes of the lattice; I places a model can be cut at; P stages that begin at
one place each; J places where they may end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsepipe.partition.costs import Bools, Costs, Ints
from sparsepipe.partition.fleet import Counts, Kind
from sparsepipe.partition.windows import Masks, Windows

EQUAL = 1e-9
"""Times that differ by this share are equal."""

MOST_AT_ONCE = 4_000_000
"""Pairs of a begin and an end whose times are in memory at a time."""


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
    """Places by node that 0, 1, ... stages reach and fewer do not, until a plan is whole.

    A plan of fewest stages passes only such places: a shorter way to one of them would make the
    whole plan shorter.
    """
    lattice = costs.lattice
    begin_VI = np.zeros((len(lattice.nodes), costs.spans.num_layers + 1), dtype=np.bool_)
    begin_VI[0, 0] = True
    levels, before_VI = [begin_VI], begin_VI.copy()
    while not levels[-1][lattice.last, -1].any():
        levels.append(windows.following(bound_s, levels[-1]) & ~before_VI)
        before_VI |= levels[-1]
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
            before_VI[lattice.ways[node].sources_E] |= begins_EI
        live.insert(0, before_VI & reached_VI)
    return live


class _Rest:
    """What the best rest of a plan costs, from each place of each node."""

    def __init__(self, costs: Costs, levels: list[Bools], bound_s: float) -> None:
        self._costs, self._levels, self._bound_s = costs, levels, bound_s
        # A place is reached with one number of stages only.
        self._worst_VI = np.full(levels[0].shape, np.inf)
        self._second_VI = np.full(levels[0].shape, np.inf)
        self._worst_VI[levels[-1]] = self._second_VI[levels[-1]] = 0.0
        for before_VI, after_VI in reversed(list(pairwise(levels))):
            for node in np.flatnonzero(after_VI.any(axis=1)):
                self._meet(int(node), before_VI, np.flatnonzero(after_VI[node]))

    def _meet(self, node: int, before_VI: Bools, ends_J: Ints) -> None:
        """What the rests of plans cost that go on with a stage to some places of a node."""
        sources_E = self._costs.lattice.ways[node].sources_E
        ways_P, begins_P = np.nonzero(before_VI[sources_E])
        worst_J, second_J = self._worst_VI[node, ends_J], self._second_VI[node, ends_J]
        for part in range(0, len(ways_P), most := 1 + MOST_AT_ONCE // len(ends_J)):
            ways, begins = ways_P[part : part + most], begins_P[part : part + most]
            times_PJ = self._costs.times_s(node, ways, begins, ends_J, self._bound_s)
            # The stage may be the slowest one, and then it is not the second-worst.
            as_worst_PJ = np.where(np.isfinite(times_PJ), worst_J, np.inf)
            rest_PJ = np.minimum(np.maximum(times_PJ, second_J), as_worst_PJ)
            all_PJ = np.maximum(times_PJ, worst_J)
            place = sources_E[ways], begins  # each of them once
            self._second_VI[place] = np.minimum(self._second_VI[place], rest_PJ.min(axis=1))
            self._worst_VI[place] = np.minimum(self._worst_VI[place], all_PJ.min(axis=1))

    def plan(self) -> list[Choice]:
        """From the front, the stage whose text comes first and that ends in a best plan."""
        limit_s = float(self._second_VI[0, 0]) * (1 + EQUAL)
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
        after_VI = self._levels[level + 1]
        for after in np.flatnonzero(after_VI.any(axis=1)):
            ways, ends = self._costs.lattice.ways[after], np.flatnonzero(after_VI[after])
            for way in np.flatnonzero(ways.sources_E == node):
                counts = tuple(int(n) for n in ways.counts_EK[way])
                times_s = self._costs.times_s(
                    int(after), np.array([way]), np.array([place]), ends, self._bound_s
                )
                for end, time_s in zip(ends, times_s[0], strict=True):
                    keeps = spare and time_s <= limit_s
                    following_VI = self._second_VI if keeps else self._worst_VI
                    enough = following_VI[after, end] <= limit_s
                    if np.isfinite(time_s) and enough and (spare or time_s <= limit_s):
                        choice = Choice(first=place, end=int(end), counts=counts)
                        yield choice, int(after), keeps
