"""Which places of a model can be reached with which devices, within a bound on all times.

Shape suffixes: E stages that end at one node of the lattice (see ``lattice.py``); V nodes; I
places a model can be cut at; R rows of sums (see ``costs.py``).

In a chain of layers a stage that is to end at j within a bound may begin at those places i with
``W[i] >= W[j] - bound * m``, for each of its kinds: a window that ends before j. What fits the
memory is a window as well.
"""

from __future__ import annotations

import numpy as np

from sparsepipe.partition.costs import Bools, Costs, Ints


class Windows:
    """Reachable places of a chain of layers: the begins that fit an end are a window."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._bound_s = -1.0
        self._starts_RI = np.empty(0, dtype=np.intp)
        self._kept_EI = [self._kept(node) for node in range(len(costs.lattice.nodes))]

    def _kept(self, node: int) -> Ints | None:
        """First begins for which a stage's devices hold what it keeps."""
        if self._costs.memory is None:
            return None
        rows = []
        for way in range(len(self._costs.lattice.ways[node].sources_E)):
            kept_I, room = self._costs.bytes_of(node, way)
            rows.append(np.searchsorted(kept_I, kept_I - room))
        return np.array(rows, dtype=np.intp).reshape(len(rows), self._costs.spans.num_layers + 1)

    def _set(self, bound_s: float) -> None:
        if bound_s == self._bound_s:
            return
        sums_RI = self._costs.sums_RI
        least_RI = sums_RI - (bound_s * self._costs.replicas_R)[:, None]
        self._starts_RI = np.array(
            [np.searchsorted(sums, least) for sums, least in zip(sums_RI, least_RI, strict=True)],
            dtype=np.intp,
        )
        self._bound_s = bound_s

    def starts_EI(self, node: int, bound_s: float) -> Ints:
        """For each stage and end the first place where it may begin."""
        self._set(bound_s)
        rows_EK = self._costs.rows_EK[node]
        starts_EI = self._starts_RI[rows_EK[:, 0]]
        for rows_E in rows_EK.T[1:]:
            starts_EI = np.maximum(starts_EI, self._starts_RI[rows_E])
        kept_EI = self._kept_EI[node]
        return starts_EI if kept_EI is None else np.maximum(starts_EI, kept_EI)

    def arrive(self, node: int, bound_s: float, sources_VI: Bools) -> Bools:
        """Places that stages reach which end at a node.

        Args:
            node: where they end.
            bound_s: of their times and of the transfers that they receive.
            sources_VI: places that the stages before may have reached, by node.
        """
        ways = self._costs.lattice.ways[node]
        fit_EI = sources_VI[ways.sources_E] & self._costs.cuts_fit_EI(node, bound_s)
        before_EI = np.zeros((fit_EI.shape[0], fit_EI.shape[1] + 1), dtype=np.int32)
        np.cumsum(fit_EI, axis=1, out=before_EI[:, 1:])
        starts_EI = self.starts_EI(node, bound_s)
        earlier_EI = np.take_along_axis(before_EI, starts_EI, axis=1)
        return np.asarray((before_EI[:, :-1] > earlier_EI).any(axis=0), dtype=np.bool_)

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        """For each stage that ends at one of some places, where it may begin."""
        ends_J = np.flatnonzero(targets_I)
        starts_EJ = self.starts_EI(node, bound_s)[:, ends_J]
        ways, places = len(starts_EJ), len(targets_I)
        change = np.zeros((ways, places + 1), dtype=np.int32)
        opens = np.minimum(starts_EJ, ends_J)
        for way in range(ways):
            np.add.at(change[way], opens[way], 1)
            np.add.at(change[way], ends_J, -1)
        begin_EI: Bools = np.cumsum(change, axis=1)[:, :-1] > 0
        return begin_EI & self._costs.cuts_fit_EI(node, bound_s)


class Masks:
    """Reachable states of a branching graph: each pair of states is looked at."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._places_I = np.arange(costs.spans.num_layers + 1)

    def _fits_II(self, node: int, way: int, bound_s: float) -> Bools:
        fits_II: Bools = np.isfinite(
            self._costs.times_s(node, way, self._places_I, self._places_I, bound_s)
        )
        return fits_II

    def arrive(self, node: int, bound_s: float, sources_VI: Bools) -> Bools:
        """As :meth:`Windows.arrive`."""
        reached_I = np.zeros(len(self._places_I), dtype=np.bool_)
        for way, source in enumerate(self._costs.lattice.ways[node].sources_E):
            if sources_VI[source].any():
                fits_JI = self._fits_II(node, way, bound_s)[sources_VI[source]]
                reached_I |= fits_JI.any(axis=0)
        return reached_I

    def depart(self, node: int, bound_s: float, targets_I: Bools) -> Bools:
        """As :meth:`Windows.depart`."""
        ways = range(len(self._costs.lattice.ways[node].sources_E))
        return np.array(
            [self._fits_II(node, way, bound_s)[:, targets_I].any(axis=1) for way in ways]
        ).reshape(len(ways), len(targets_I))


def reaches(costs: Costs) -> Windows | Masks:
    """What suits the model: windows for a chain, masks for a graph."""
    return Windows(costs) if costs.spans.nested_II is None else Masks(costs)
