"""Which places of a model can be reached with which devices, within a bound on all times.

Shape suffixes: E stages that end at one node of the lattice (see ``lattice.py``); V nodes; I
places a model can be cut at; R, C and M rows of sums, of stages and of memory (see ``costs.py``);
T rates of transfers.

In a chain of layers a stage that is to end at j within a bound may begin at those places i with
``W[i] >= W[j] - bound * m``, for each of its kinds: a window that ends before j. What fits the
memory is a window as well. There is a begin in it if the latest place before j that the stages
before have reached, and whose transfer fits, is not before the window.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.costs import Bools, Costs, Ints

Places = NDArray[np.int32]

_ROUNDING = 1e-12
"""Far above what sums of times differ by for being rounded."""


class Windows:
    """Reachable places of a chain of layers: the begins that fit an end are a window."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._bound_s = -1.0
        self._places_I = np.arange(costs.spans.num_layers + 1, dtype=np.int32)
        self._starts_CI = np.empty((0, 0), dtype=np.int32)
        self._fits_TI = np.empty((0, 0), dtype=np.bool_)
        self._kept_MI = self._kept()

    def _kept(self) -> Places:
        """First begins for which a stage's devices hold what it keeps."""
        rows = [
            np.searchsorted(before_I, after_I - room)
            for before_I, after_I, room in map(self._costs.kept, range(self._costs.num_rooms))
        ]
        return np.array(rows, dtype=np.int32).reshape(len(rows), len(self._places_I))

    def _set(self, bound_s: float) -> None:
        if bound_s == self._bound_s:
            return
        costs = self._costs
        least_RI = costs.sums_RI - (bound_s * costs.replicas_R)[:, None]
        starts_RI = np.array(
            [np.searchsorted(*row) for row in zip(costs.sums_RI, least_RI, strict=True)],
            dtype=np.int32,
        )
        starts_CI = starts_RI[costs.rows_CK[:, 0]]
        for rows_C in costs.rows_CK.T[1:]:
            np.maximum(starts_CI, starts_RI[rows_C], out=starts_CI)
        self._starts_CI, self._fits_TI = starts_CI, costs.cuts_fit_TI(bound_s)
        # Mostly all transfers fit, or the same ones at all rates.
        self._alike = bool((self._fits_TI == self._fits_TI[0]).all())
        self._bound_s = bound_s

    def _starts_EI(self, node: int, ways: Ints | slice) -> Places:
        """For each stage and end the first place where it may begin."""
        costs = self._costs
        starts_EI: Places = self._starts_CI[costs.stages_E[node][ways]]
        if len(self._kept_MI):
            np.maximum(starts_EI, self._kept_MI[costs.rooms_E[node][ways]], out=starts_EI)
        return starts_EI

    def _latest(self, begin_XI: Bools, fits_XI: Bools) -> Places:
        """For each end the latest place before it where a stage may begin; -1 without any."""
        latest_XI = np.full(begin_XI.shape, -1, dtype=np.int32)
        places_XI = np.where(begin_XI & fits_XI, self._places_I, np.int32(-1))
        np.maximum.accumulate(places_XI[:, :-1], axis=1, out=latest_XI[:, 1:])
        return latest_XI

    def _ends_I(self, node: int, ways: Ints | slice, begin_VI: Bools, latest_VI: Places) -> Bools:
        """Places where stages end that go some ways to a node."""
        sources_E = self._costs.lattice.ways[node].sources_E[ways]
        if self._alike:
            latest_EI = latest_VI[sources_E]
        else:
            rates_E = self._costs.rates_E[node][ways]
            latest_EI = self._latest(begin_VI[sources_E], self._fits_TI[rates_E])
        fits_EI = latest_EI >= self._starts_EI(node, ways)
        return np.asarray(fits_EI.any(axis=0), dtype=np.bool_)

    def reached(self, bound_s: float) -> Bools:
        """Places reached by any number of stages, by node.

        Args:
            bound_s: of their times and of their transfers.
        """
        self._set(bound_s)
        reached_VI, latest_VI = self._nothing()
        for node in range(len(reached_VI)):
            if node:
                reached_VI[node] = self._ends_I(node, slice(None), reached_VI, latest_VI)
            if self._alike:
                latest_VI[node] = self._latest(reached_VI[node : node + 1], self._fits_TI[:1])[0]
        return reached_VI

    def _nothing(self) -> tuple[Bools, Places]:
        shape = len(self._costs.lattice.nodes), len(self._places_I)
        reached_VI = np.zeros(shape, dtype=np.bool_)
        reached_VI[0, 0] = True
        return reached_VI, np.full(shape, -1, dtype=np.int32)

    def following(self, bound_s: float, begin_VI: Bools) -> Bools:
        """Places reached by one more stage.

        Args:
            bound_s: of its time and of the transfer that it receives.
            begin_VI: where it may begin, by node.
        """
        self._set(bound_s)
        latest_VI = self._latest(begin_VI, self._fits_TI[:1])
        some_V = np.asarray(begin_VI.any(axis=1), dtype=np.bool_)
        ends_VI = np.zeros_like(begin_VI)
        for node, found in enumerate(self._costs.lattice.ways):
            ways = np.flatnonzero(some_V[found.sources_E])
            if len(ways):
                ends_VI[node] = self._ends_I(node, ways, begin_VI, latest_VI)
        return ends_VI

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        """For each stage that ends at one of some places, where it may begin."""
        self._set(bound_s)
        ends_J = np.flatnonzero(targets_I)
        starts_EJ = self._starts_EI(node, slice(None))[:, ends_J]
        ways, places = len(starts_EJ), len(targets_I)
        change_EI = np.zeros((ways, places + 1), dtype=np.int32)
        every_E = np.arange(ways)[:, None]
        np.add.at(change_EI, (every_E, np.minimum(starts_EJ, ends_J)), 1)
        np.add.at(change_EI, (every_E, ends_J[None, :]), -1)
        begin_EI = np.asarray(np.cumsum(change_EI, axis=1)[:, :-1] > 0, dtype=np.bool_)
        return begin_EI & self._fits_TI[self._costs.rates_E[node]]


class Masks:
    """Reachable states of a branching graph, or places of a chain: each pair is looked at."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._places_I = np.arange(costs.spans.num_layers + 1)

    def _fits_PJ(self, node: int, way: int, begins_P: Ints, ends_J: Ints, bound_s: float) -> Bools:
        ways_P = np.full(len(begins_P), way)
        times_s = self._costs.times_s(node, ways_P, begins_P, ends_J, bound_s)
        return np.asarray(np.isfinite(times_s), dtype=np.bool_)

    def _ends_I(self, node: int, bound_s: float, begin_VI: Bools) -> Bools:
        ends_I = np.zeros(len(self._places_I), dtype=np.bool_)
        # The stages of fewest devices first: they lead furthest, and few places are left to others.
        for way in reversed(range(len(self._costs.lattice.ways[node].sources_E))):
            source = self._costs.lattice.ways[node].sources_E[way]
            begins, left = self._near(node, way, bound_s, begin_VI[source], ~ends_I)
            if len(begins) and len(left):
                ends_I[left] = self._fits_PJ(node, way, begins, left, bound_s).any(axis=0)
        return ends_I

    def _near(
        self, node: int, way: int, bound_s: float, begin_I: Bools, end_I: Bools
    ) -> tuple[Ints, Ints]:
        """Begins and ends that may be near enough to one another, by one kind of the devices."""
        begins, ends = np.flatnonzero(begin_I), np.flatnonzero(end_I)
        if not (len(begins) and len(ends)):
            return begins, ends
        row = self._costs.rows_CK[self._costs.stages_E[node][way], 0]
        sums_I = self._costs.sums_RI[row]
        most = bound_s * self._costs.replicas_R[row] * (1 + _ROUNDING) + _ROUNDING * sums_I[-1]
        ends = ends[sums_I[ends] <= sums_I[begins].max() + most]
        if len(ends):
            begins = begins[sums_I[begins] >= sums_I[ends].min() - most]
        return begins, ends

    def reached(self, bound_s: float) -> Bools:
        """As :meth:`Windows.reached`."""
        nodes = len(self._costs.lattice.nodes)
        reached_VI = np.zeros((nodes, len(self._places_I)), dtype=np.bool_)
        reached_VI[0, 0] = True
        for node in range(1, nodes):
            reached_VI[node] = self._ends_I(node, bound_s, reached_VI)
        return reached_VI

    def following(self, bound_s: float, begin_VI: Bools) -> Bools:
        """As :meth:`Windows.following`."""
        nodes = range(len(begin_VI))
        return np.array([self._ends_I(node, bound_s, begin_VI) for node in nodes])

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        """As :meth:`Windows.depart`."""
        ways, ends_J = (
            range(len(self._costs.lattice.ways[node].sources_E)),
            np.flatnonzero(targets_I),
        )
        return np.array(
            [self._fits_PJ(node, way, self._places_I, ends_J, bound_s).any(axis=1) for way in ways]
        ).reshape(len(ways), len(targets_I))


def reaches(costs: Costs) -> Windows | Masks:
    """What suits the model: windows for a chain, masks for a graph or where costs are of pairs."""
    chain = costs.spans.nested_II is None
    return Windows(costs) if chain and costs.by_windows else Masks(costs)
