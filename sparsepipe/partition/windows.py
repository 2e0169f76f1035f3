"""Which spans a stage may hold: within a bound on its time, and within the memory it has.

Shape suffixes: E stages that end at one node of the lattice (see ``lattice.py``); I places a
model can be cut at; K kinds of devices; R rows: kinds, numbers of replicas and bandwidths that
occur together.

The time of a stage of m devices is the largest of ``(W[j] - W[i]) / m`` over its kinds, with
``W`` the sum of compute and, for each byte of parameters, of the all-reduce. So for each end j
the places i at which the stage may begin are those with ``W[i] >= W[j] - bound * m``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.cost import CostModel
from sparsepipe.partition.lattice import Lattice, Ways
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.spans import Floats, Spans

_NOTHING = 1e-9
"""Share of the longest time below which none is told from zero."""

Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]


class Costs:
    """Times of all stages and cuts that a search may choose from.

    Args:
        spans: of the model.
        lattice: of the devices.
        model: says what they cost.
        memory: says what they keep; None: no device's memory is a limit.
    """

    def __init__(
        self, spans: Spans, lattice: Lattice, model: CostModel, memory: MemoryModel | None
    ) -> None:
        self.spans, self.lattice, self.model, self.memory = spans, lattice, model, memory
        keys: dict[tuple[int, int, float], int] = {}
        self.rows_EK = [self._rows(ways, keys) for ways in lattice.ways]
        compute_s_KI, parameters_I = spans.compute_s_KI, spans.parameter_bytes_I
        sync_R = [model.sync_s_per_byte(m, bytes_per_s=speed) for _, m, speed in keys]
        kinds_R = [kind for kind, _, _ in keys]
        self.sums_RI = compute_s_KI[kinds_R] + np.array(sync_R)[:, None] * parameters_I
        self.replicas_R = np.array([m for _, m, _ in keys])
        self._cut_s_per_byte_E = [self._cuts(ways) for ways in lattice.ways]

    def _rows(self, ways: Ways, keys: dict[tuple[int, int, float], int]) -> Ints:
        """For each stage and kind the row of its sums; that of another of its kinds for 0."""
        rows_EK = np.zeros(ways.counts_EK.shape, dtype=np.intp)
        for e, (counts, replicas, speed) in enumerate(
            zip(ways.counts_EK, ways.replicas_E, ways.sync_E, strict=True)
        ):
            present = [
                keys.setdefault((int(k), int(replicas), float(speed)), len(keys))
                for k in np.flatnonzero(counts)
            ]
            rows_EK[e] = present[0]
            rows_EK[e, np.flatnonzero(counts)] = present
        return rows_EK

    def _cuts(self, ways: Ways) -> Floats:
        return np.array(
            [
                self.model.cut_s_per_byte(int(m), bytes_per_s=float(speed))
                for m, speed in zip(ways.replicas_E, ways.cut_E, strict=True)
            ]
        )

    def cut_s(self, node: int, way: int, places: Ints) -> Floats:
        """Of the transfers that a stage receives, if it begins at some places."""
        times: Floats = self._cut_s_per_byte_E[node][way] * self.spans.cut_bytes_I[places]
        return times

    def cuts_fit_EI(self, node: int, bound_s: float) -> Bools:
        """At which places the stages that end at a node may begin, for their transfers."""
        per_byte_E = self._cut_s_per_byte_E[node]
        fit_EI: Bools = per_byte_E[:, None] * self.spans.cut_bytes_I <= bound_s
        return fit_EI

    def stage_s(self, node: int, way: int, begins: Ints, ends: Ints) -> Floats:
        """Of a stage for each pair of a begin and an end; arrays broadcast."""
        rows_K = sorted(set(self.rows_EK[node][way].tolist()))
        sums = self.sums_RI[rows_K]
        spans = sums[:, ends] - sums[:, begins]
        times: Floats = spans.max(axis=0) / self.lattice.ways[node].replicas_E[way]
        return times

    def bounds_s(self) -> tuple[float, float]:
        """A time that no plan can beat, and one that every plan keeps to."""
        spans = self.spans
        most_cut = max(float(per_byte_E.max(initial=0.0)) for per_byte_E in self._cut_s_per_byte_E)
        most_s = float(self.sums_RI[:, -1].max() + most_cut * spans.cut_bytes_I.max())
        least_s = 0.0
        if spans.nested_II is None:  # each layer on the kind that is fastest with it
            layers_s_KL = np.diff(spans.compute_s_KI, axis=1)
            least_s = float(layers_s_KL.min(axis=0).sum()) / sum(self.lattice.all_used)
        return max(least_s, most_s * _NOTHING), most_s

    def times_s(self, node: int, way: int, begins: Ints, ends: Ints, bound_s: float) -> Floats:
        """Times of a stage for begins x ends; infinite where it may not be, or is too slow."""
        begins, ends = begins[:, None], ends[None, :]
        times = self.stage_s(node, way, begins, ends)
        nested_II = self.spans.nested_II
        allowed = begins < ends if nested_II is None else nested_II[begins, ends]
        allowed = allowed & (times <= bound_s) & (self.cut_s(node, way, begins) <= bound_s)
        if self.memory is not None:
            kept_I, room = self.bytes_of(node, way)
            allowed &= kept_I[ends] - kept_I[begins] <= room
        return np.where(allowed, times, np.inf)

    def bytes_of(self, node: int, way: int) -> tuple[Floats, float]:
        """Sums of what a stage keeps, by place, and how much its devices hold."""
        assert self.memory is not None
        ways, kinds = self.lattice.ways[node], self.lattice.kinds
        flying = self.memory.in_flight(int(ways.replicas_E[way]), int(ways.left_E[way]))
        limits = [kinds[k].memory_bytes for k in np.flatnonzero(ways.counts_EK[way])]
        room = min((limit for limit in limits if limit is not None), default=float("inf"))
        kept_I = (
            self.memory.per_parameter_byte(flying) * self.spans.parameter_bytes_I
            + flying * self.spans.stored_bytes_I
        )
        return kept_I, room - self.memory.reserved_bytes


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
        reached_I: Bools = (before_EI[:, :-1] > earlier_EI).any(axis=0)
        return reached_I

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

