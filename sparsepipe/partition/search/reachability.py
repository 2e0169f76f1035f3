"""Which cut positions of a model can be reached with which devices, within a bound on all times.

In a chain of layers, the possible ends of a stage follow one another: a stage on m devices that
begins at i may end at any later position up to the last j with ``W[j] <= W[i] + bound * m``, for
each of its kinds (``W``: see ``stage_costs.py``), and up to the last one that its devices' memory
allows. So a stage can end at j if any stage that begins before j may end at j or later.

Memory makes a few exceptions: if an output that no layer saves is larger than what the next layers
save, a stage that ends with it keeps more than a longer one. Such ends are tested for each
beginning.

Among plans with the same bottleneck (times that differ by a billionth count as equal), those with
the fewest stages are better; among these, those whose second-worst stage takes less time; among
these, the one whose text comes first, stage by stage.

Shape suffixes: E stages that end at one node of the lattice; V nodes; I cut positions; P some of
them, where stages begin; J positions where they may end; R, C and M rows of sums, of stages and of
memory (see ``stage_costs.py``); T rates of transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.costs.layers import Bools, Floats, Ints
from sparsepipe.partition.costs.model import EQUAL
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.search.stage_costs import Costs

Places = NDArray[np.int32]

_ROUNDING = 1e-12
"""Relative tolerance, far above the rounding errors of sums of times."""


class ChainReachability:
    """Finds reachable positions in a chain: a stage's ends are consecutive, with few exceptions."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._bound_s = -1.0
        self._places_I = np.arange(costs.spans.num_layers + 1, dtype=np.int32)
        self._last_CI = np.empty((0, 0), dtype=np.int32)
        self._fits_TI = np.empty((0, 0), dtype=np.bool_)
        # Ends outside of windows, and positions to begin at.
        self._exceptions: list[tuple[int, slice]] = []
        # The last ends that the memory of devices allows, and the exceptions before them.
        kept = [*map(costs.kept, range(costs.num_rooms))]
        shape = len(kept), len(self._places_I)
        self._most_MI = np.array([begin_I + room for begin_I, _, room in kept]).reshape(shape)
        self._kept_MI = np.array([end_I for _, end_I, _ in kept]).reshape(shape)
        rising_MI = np.maximum.accumulate(self._kept_MI, axis=1)
        rows = [_last(*row) for row in zip(rising_MI, self._most_MI, strict=True)]
        self._held_MI = np.array(rows, dtype=np.int32).reshape(shape)
        self._alone_I = (self._kept_MI < rising_MI).any(axis=0)

    def _set(self, bound_s: float) -> None:
        if bound_s == self._bound_s:
            return
        costs = self._costs
        most_RI = costs.sums_RI + (bound_s * costs.replicas_R)[:, None]
        last_RI = np.array([_last(*row) for row in zip(costs.sums_RI, most_RI, strict=True)])
        self._last_CI = last_RI[costs.rows_CK].min(axis=1)
        self._fits_TI = costs.cut_s_per_byte_T[:, None] * costs.spans.cut_bytes_I <= bound_s
        self._all_fit = bool(self._fits_TI.all())  # usually
        self._exceptions = []
        for end in np.flatnonzero(self._alone_I).tolist():
            nearest = int((self._last_CI[:, :end] >= end).any(axis=0).argmax())
            self._exceptions.append((end, slice(nearest, end)))
        self._bound_s = bound_s

    def _last_EI(self, node: int, ways: Ints | slice) -> Places:
        """Last possible end of each stage, by where it begins; none if not after that."""
        costs = self._costs
        last_EI: Places = self._last_CI[costs.stages_E[node][ways]]
        if len(self._held_MI):
            np.minimum(last_EI, self._held_MI[costs.rooms_E[node][ways]], out=last_EI)
        if not self._all_fit:
            last_EI *= self._fits_TI[costs.rates_E[node][ways]]
        return last_EI

    def _ends_I(self, node: int, ways: Ints | slice, begin_VI: Bools) -> Bools:
        """The positions at which the stages ``ways`` to a node may end if begun at ``begin_VI``."""
        begin_EI = begin_VI[self._costs.lattice.ways[node].sources_E[ways]]
        last_EI = self._last_EI(node, ways)
        last_EI *= begin_EI
        last_I = last_EI.max(axis=0)
        ends_I = np.zeros(len(last_I), dtype=np.bool_)
        ends_I[1:] = np.maximum.accumulate(last_I)[:-1] >= self._places_I[1:]
        for end, begins in self._exceptions:
            ends_I[end] = (begin_EI[:, begins] & self._may_end_EP(node, ways, end, begins)).any()
        return ends_I

    def _may_end_EP(self, node: int, ways: Ints | slice, end: int, begins: slice) -> Bools:
        """Whether time and memory let each stage end at ``end``, by where it begins."""
        costs = self._costs
        held_MP = self._kept_MI[:, end, None] <= self._most_MI[:, begins]
        may_EP = self._last_CI[:, begins][costs.stages_E[node][ways]] >= end
        may_EP &= held_MP[costs.rooms_E[node][ways]]
        may_EP &= self._fits_TI[:, begins][costs.rates_E[node][ways]]
        return np.asarray(may_EP, dtype=np.bool_)

    def reached(self, bound_s: float) -> Bools:
        """By node, the positions that any number of stages, each within ``bound_s``, can reach."""
        self._set(bound_s)
        reached_VI = np.zeros((len(self._costs.lattice.nodes), len(self._places_I)), dtype=np.bool_)
        reached_VI[0, 0] = True
        for node in range(1, len(reached_VI)):
            reached_VI[node] = self._ends_I(node, slice(None), reached_VI)
        return reached_VI

    def following(self, bound_s: float, begin_VI: Bools) -> Bools:
        """By node, the positions that one more stage can reach from ``begin_VI`` in ``bound_s``."""
        self._set(bound_s)
        some_V = np.asarray(begin_VI.any(axis=1), dtype=np.bool_)
        ends_VI = np.zeros_like(begin_VI)
        for node, found in enumerate(self._costs.lattice.ways):
            ways = np.flatnonzero(some_V[found.sources_E])
            if len(ways):
                ends_VI[node] = self._ends_I(node, ways, begin_VI)
        return ends_VI

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        """For each stage to ``node``, positions from which it can end at one of ``targets_I``."""
        self._set(bound_s)
        beyond = np.int32(len(targets_I))
        places_I = np.where(targets_I & ~self._alone_I, self._places_I, beyond)
        next_I = np.full_like(self._places_I, beyond)  # the next place after each position
        next_I[:-1] = np.minimum.accumulate(places_I[:0:-1])[::-1]
        may_EI = np.asarray(next_I <= self._last_EI(node, slice(None)), dtype=np.bool_)
        for end, begins in self._exceptions:
            if targets_I[end]:
                may_EI[:, begins] |= self._may_end_EP(node, slice(None), end, begins)
        return may_EI


def _last(sums_I: Floats, most_I: Floats) -> Places:
    return (np.searchsorted(sums_I, most_I, side="right") - 1).astype(np.int32)


class PairReachability:
    """Finds reachable states of a graph, or positions in a chain, by testing each pair of them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._places_I = np.arange(costs.spans.num_layers + 1)

    def _fits_PJ(self, node: int, way: int, begins_P: Ints, ends_J: Ints, bound_s: float) -> Bools:
        ways_P = np.full(len(begins_P), way)
        times_s = self._costs.times_s(node, ways_P, begins_P, ends_J, bound_s)
        return np.asarray(np.isfinite(times_s), dtype=np.bool_)

    def _ends_I(self, node: int, bound_s: float, begin_VI: Bools) -> Bools:
        costs, ends_I = self._costs, np.zeros(len(self._places_I), dtype=np.bool_)
        # The stages of fewest devices first: they lead furthest, and leave few positions to others.
        for way in reversed(range(len(costs.lattice.ways[node].sources_E))):
            source = costs.lattice.ways[node].sources_E[way]
            begins, ends = np.flatnonzero(begin_VI[source]), np.flatnonzero(~ends_I)
            if not (len(begins) and len(ends)):
                continue
            # Only those count that may be near enough to each other, judged by one kind of device.
            row = costs.rows_CK[costs.stages_E[node][way], 0]
            sums_I = costs.sums_RI[row]
            most = bound_s * costs.replicas_R[row] * (1 + _ROUNDING) + _ROUNDING * sums_I[-1]
            ends = ends[sums_I[ends] <= sums_I[begins].max() + most]
            if len(ends):
                begins = begins[sums_I[begins] >= sums_I[ends].min() - most]
            if len(begins) and len(ends):
                ends_I[ends] = self._fits_PJ(node, way, begins, ends, bound_s).any(axis=0)
        return ends_I

    def reached(self, bound_s: float) -> Bools:
        nodes = len(self._costs.lattice.nodes)
        reached_VI = np.zeros((nodes, len(self._places_I)), dtype=np.bool_)
        reached_VI[0, 0] = True
        for node in range(1, nodes):
            reached_VI[node] = self._ends_I(node, bound_s, reached_VI)
        return reached_VI

    def following(self, bound_s: float, begin_VI: Bools) -> Bools:
        nodes = range(len(begin_VI))
        return np.array([self._ends_I(node, bound_s, begin_VI) for node in nodes])

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        ways = range(len(self._costs.lattice.ways[node].sources_E))
        ends_J = np.flatnonzero(targets_I)
        return np.array(
            [self._fits_PJ(node, way, self._places_I, ends_J, bound_s).any(axis=1) for way in ways]
        ).reshape(len(ways), len(targets_I))


MOST_AT_ONCE = 4_000_000
"""The most pairs of a stage's beginning and end whose times are in memory at a time."""


def best_of_ties(
    costs: Costs, windows: ChainReachability | PairReachability, bottleneck_s: float
) -> list[Choice]:
    """The best plan with this bottleneck: fewest stages, least second-worst time, first text."""
    bound_s, lattice = bottleneck_s * (1 + EQUAL), costs.lattice
    # Positions by node that 0, 1, ... stages reach and fewer do not, until a plan is found: a plan
    # of fewest stages passes only these, since fewer stages up to one would make it shorter.
    begin_VI = np.zeros((len(lattice.nodes), costs.spans.num_layers + 1), dtype=np.bool_)
    begin_VI[0, 0] = True
    levels, before_VI = [begin_VI], begin_VI.copy()
    while not levels[-1][lattice.last, -1].any():
        levels.append(windows.following(bound_s, levels[-1]) & ~before_VI)
        before_VI |= levels[-1]
    # Among these, the positions from which a plan with this number of stages can be completed.
    targets_VI = np.zeros_like(levels[-1])
    targets_VI[lattice.last, -1] = levels[-1][lattice.last, -1]
    live = [targets_VI]
    for reached_VI in reversed(levels[:-1]):
        before_VI = np.zeros_like(reached_VI)
        for node in np.flatnonzero(live[0].any(axis=1)):
            begins_EI = windows.depart(int(node), bound_s, live[0][node])
            before_VI[lattice.ways[node].sources_E] |= begins_EI
        live.insert(0, before_VI & reached_VI)
    return _Remainder(costs, live, bound_s).plan()


class _Remainder:
    """Least possible worst and second-worst times of stages to come, by node and position."""

    def __init__(self, costs: Costs, levels: list[Bools], bound_s: float) -> None:
        self._costs, self._levels, self._bound_s = costs, levels, bound_s
        # A position is reached with one number of stages only.
        self._worst_VI = np.full(levels[0].shape, np.inf)
        self._second_VI = np.full(levels[0].shape, np.inf)
        self._worst_VI[levels[-1]] = self._second_VI[levels[-1]] = 0.0
        for before_VI, after_VI in reversed(list(pairwise(levels))):
            for node in np.flatnonzero(after_VI.any(axis=1)):
                self._continue_to(int(node), before_VI, np.flatnonzero(after_VI[node]))

    def _continue_to(self, node: int, before_VI: Bools, ends_J: Ints) -> None:
        sources_E = self._costs.lattice.ways[node].sources_E
        ways_P, begins_P = np.nonzero(before_VI[sources_E])
        worst_J, second_J = self._worst_VI[node, ends_J], self._second_VI[node, ends_J]
        for part in range(0, len(ways_P), most := 1 + MOST_AT_ONCE // len(ends_J)):
            ways, begins = ways_P[part : part + most], begins_P[part : part + most]
            times_PJ = self._costs.times_s(node, ways, begins, ends_J, self._bound_s)
            # If the stage is the slowest one, it is not the second-worst.
            as_worst_PJ = np.where(np.isfinite(times_PJ), worst_J, np.inf)
            rest_PJ = np.minimum(np.maximum(times_PJ, second_J), as_worst_PJ)
            all_PJ = np.maximum(times_PJ, worst_J)
            place = sources_E[ways], begins  # no pair of node and position occurs twice
            self._second_VI[place] = np.minimum(self._second_VI[place], rest_PJ.min(axis=1))
            self._worst_VI[place] = np.minimum(self._worst_VI[place], all_PJ.min(axis=1))

    def plan(self) -> list[Choice]:
        """The stages of the best plan; among equal plans, the one whose text comes first."""
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
        """Yields possible next stages, their nodes, and whether a later one may be too slow."""
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
