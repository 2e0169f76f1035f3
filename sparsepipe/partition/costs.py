"""Times and memory of all stages that a search may choose from, as arrays.

Shape suffixes: E stages that end at one node of the lattice (see ``lattice.py``); I places a
model can be cut at; K kinds of devices; R rows: kinds, numbers of replicas and bandwidths that
occur together.

The time of a stage of m devices is the largest of ``(W[j] - W[i]) / m`` over its kinds, with
``W`` the sum of compute and, for each byte of parameters, of the all-reduce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.cost import CostModel
from sparsepipe.partition.lattice import Lattice, Ways
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.spans import Floats, Spans

Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]


class Costs:
    """Times of all stages and cuts that a search may choose from.

    Args:
        spans: of the model.
        lattice: of the devices.
        model: says what they cost.
        memory: says what they keep; None: no device's memory is a limit.
        more_bytes: that each device is taken to hold beyond its limit.
    """

    def __init__(
        self,
        spans: Spans,
        lattice: Lattice,
        model: CostModel,
        memory: MemoryModel | None,
        *,
        more_bytes: float = 0.0,
    ) -> None:
        self._more_bytes = more_bytes
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
        return least_s, most_s

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
        return kept_I, room_bytes(room + self._more_bytes) - self.memory.reserved_bytes
