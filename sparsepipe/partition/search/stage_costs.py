"""Times and memory of all stages that a search may choose from, as arrays.

The time of a stage of m devices is the largest of ``(W[j] - W[i]) / m`` over its kinds, where ``W``
is the running sum of compute and, for each byte of parameters, of the all-reduce. If stages
recompute layers, the time is not a difference of sums, and each pair of beginning and end is
tested, as for branching graphs.

In a synchronous pipeline, a stage keeps what its microbatches in flight need. Their sizes depend on
the number of devices of the first stage: if memory counts, plans are searched for one such number
after another. A stage with more devices than microbatches is left out, since the strategy refuses
it.

Shape suffixes: E stages that end at one node of the lattice, or at any, one node after another; I
cut positions; K kinds of devices; R rows of sums: kinds, numbers of replicas and bandwidths that
occur together; C stages that cost the same: kinds, replicas and bandwidth; M classes of memory:
minibatches in flight, replicas and limit; T rates of transfers; P stages that begin at one position
each; J positions where they may end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.costs.layers import Floats, Ints, Spans
from sparsepipe.partition.costs.model import EXACT, CostModel
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.checkpointed_stages import RecomputationCosts, StageClass
from sparsepipe.partition.search.lattice import Lattice, Transitions


class Costs:
    """Times of all stages and cuts that a search may choose from.

    Args:
        spans: costs of the layers.
        lattice: the stages, by the devices used before and after.
        model: costs of stages and cuts.
        memory: counts the bytes that a device keeps; None: memory is not limited.

    Attributes:
        sums_RI: W for each kind, number of replicas and bandwidth, which make a row.
        rows: the row of ``sums_RI`` for a kind, a number of replicas and a bandwidth.
        rows_CK: rows of ``sums_RI`` for the kinds of a stage; for kinds that it does not have, the
            row of its first kind.
        stages_E: for each node, the index among C of each stage that ends there.
        rates_E: for each node, the index among T of the transfer to each stage.
        rooms_E: for each node, the index among M of each stage; empty if memory is not limited.
        by_windows: whether, in a chain of layers, the possible ends of a stage follow one another,
            except those that memory excludes (see ``reachability.py``).
    """

    by_windows = True

    def __init__(
        self, spans: Spans, lattice: Lattice, model: CostModel, memory: MemoryModel | None
    ) -> None:
        self.spans, self.lattice, self.model, self.memory = spans, lattice, model, memory
        self._ends = np.cumsum([len(ways.sources_E) for ways in lattice.ways])[:-1]
        replicas_E, counts_EK = self._all("replicas_E"), self._all("counts_EK")
        stages, numbers = distinct([replicas_E, self._all("sync_E"), *(counts_EK > 0).T])
        self.stages_E = np.split(numbers, self._ends)
        self.rows = keys = dict[tuple[int, int, float], int]()
        rows_CK = []
        for m, speed, *present in stages.tolist():
            row = [
                keys.setdefault((k, int(m), speed), len(keys)) if there else -1
                for k, there in enumerate(present)
            ]
            first = next(r for r in row if r >= 0)
            rows_CK.append([first if r < 0 else r for r in row])
        self.rows_CK: Ints = np.array(rows_CK, dtype=np.intp)
        sync_R = [model.sync_s_per_byte(m, bytes_per_s=speed) for _, m, speed in keys]
        compute_s_RI = spans.compute_s_KI[[kind for kind, _, _ in keys]]
        self.sums_RI: Floats = compute_s_RI + np.array(sync_R)[:, None] * spans.parameter_bytes_I
        self.replicas_R = np.array([m for _, m, _ in keys])
        pairs, numbers = distinct([replicas_E, self._all("cut_E")])
        each = [model.cut_s_per_byte(int(m), bytes_per_s=speed) for m, speed in pairs.tolist()]
        self.cut_s_per_byte_T, same = np.unique(each, return_inverse=True)
        self.rates_E = np.split(same[numbers], self._ends)
        self.num_rooms = 0
        self.rooms_E: list[Ints] = []
        if memory is None:
            return
        self._stored = spans.stored_between()
        pairs, same = distinct([replicas_E, self._all("left_E")])
        in_flight = np.array([memory.in_flight(int(r), int(left)) for r, left in pairs])[same]
        limits_K = [
            np.inf if kind.memory_bytes is None else kind.memory_bytes for kind in lattice.kinds
        ]
        room = np.where(counts_EK > 0, limits_K, np.inf).min(axis=1)
        # All numbers of replicas above 1 need the same bytes for each parameter.
        rooms, numbers = distinct([in_flight, np.minimum(replicas_E, 2), room])
        self._rooms_M = [(int(m), int(r), limit) for m, r, limit in rooms.tolist()]
        self.num_rooms = len(rooms)
        self.rooms_E = np.split(numbers, self._ends)

    def _all(self, name: str) -> NDArray[np.float64]:
        rows: NDArray[np.float64] = np.concatenate([getattr(w, name) for w in self.lattice.ways])
        return rows

    def bounds_s(self) -> tuple[float, float]:
        """A lower and an upper bound of the bottleneck of any plan, in seconds."""
        spans = self.spans
        most_cut = float(self.cut_s_per_byte_T.max())
        most_s = float(self.sums_RI[:, -1].max() + most_cut * spans.cut_bytes_I.max())
        least_s = 0.0
        if spans.nested_II is None:  # each layer on the kind that is fastest with it
            layers_s_KL = np.diff(spans.compute_s_KI, axis=1)
            least_s = float(layers_s_KL.min(axis=0).sum()) / sum(self.lattice.all_used)
        return least_s, most_s

    def times_s(
        self, node: int, ways_P: Ints, begins_P: Ints, ends_J: Ints, bound_s: float
    ) -> Floats:
        """Seconds [P, J] of stages ``ways_P`` to ``node`` from ``begins_P`` to ``ends_J``; infinite
        if they or their input exceed ``bound_s``, or if memory or the graph does not allow them.
        """
        begins_P1, ends_J = begins_P[:, None], ends_J[None, :]
        sums_PJ = np.full((len(begins_P), ends_J.shape[1]), -np.inf)
        for rows_P in self.rows_CK[self.stages_E[node][ways_P]].T:
            rows_P1 = rows_P[:, None]
            span_PJ = self.sums_RI[rows_P1, ends_J] - self.sums_RI[rows_P1, begins_P1]
            np.maximum(sums_PJ, span_PJ, out=sums_PJ)
        times_PJ = sums_PJ / self.lattice.ways[node].replicas_E[ways_P][:, None]
        nested_II = self.spans.nested_II
        allowed_PJ = begins_P1 < ends_J if nested_II is None else nested_II[begins_P1, ends_J]
        each_s_P = self.cut_s_per_byte_T[self.rates_E[node][ways_P]]
        cuts_fit_P = each_s_P * self.spans.cut_bytes_I[begins_P] <= bound_s
        allowed_PJ = allowed_PJ & (times_PJ <= bound_s) & cuts_fit_P[:, None]
        if self.num_rooms:
            rooms_P = self.rooms_E[node][ways_P]
            for number in set(rooms_P.tolist()):
                before_I, after_I, room = self.kept(number)
                fits_PJ = after_I[ends_J] - before_I[begins_P1] <= room
                allowed_PJ &= fits_PJ | (rooms_P != number)[:, None]
        return np.where(allowed_PJ, times_PJ, np.inf)

    def kept(self, number: int) -> tuple[Floats, Floats, float]:
        """Two arrays [I] of bytes for the memory class ``number``, and a limit: a stage fits if the
        second where it ends minus the first where it begins does not exceed it.
        """
        assert self.memory is not None
        in_flight, replicas, room = self._rooms_M[number]
        each = self.memory.per_parameter_byte(in_flight, replicas=replicas)
        weights_I = each * self.spans.parameter_bytes_I
        before_I, after_I = (weights_I + in_flight * part_I for part_I in self._stored)
        return before_I, after_I, room_bytes(room) - self.memory.reserved_bytes


def distinct(columns: Sequence[NDArray[np.generic]]) -> tuple[Floats, Ints]:
    """The distinct rows of a table given by columns, and for each row its index among them."""
    rows = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    found, numbers = np.unique(rows, axis=0, return_inverse=True)
    return found, np.asarray(numbers, dtype=np.intp).reshape(-1)


class SynchronousCosts(Costs):
    """Costs of stages that keep what their microbatches in flight need, and recompute nothing."""

    def __init__(self, problem: Problem, lattice: Lattice, runs: RecomputationCosts) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs = problem, runs
        self._kept: list[tuple[Floats, Floats, float]] = []

    def of_readers(self, readers: int | None) -> SynchronousCosts:
        """Costs for plans whose first stage has ``readers`` devices; None stands for any number and
        is allowed only if memory is not limited.
        """
        other = copy(self)
        replicas_E, left_E = (self._all(name).astype(np.intp) for name in ("replicas_E", "left_E"))
        microbatches = self._runs.microbatches
        may_E = replicas_E <= microbatches.count
        if readers is not None:
            is_first_E = left_E == sum(self.lattice.all_used)
            may_E &= ~is_first_E | (replicas_E == readers)
        classes: dict[StageClass, int] = {}
        numbers_E = np.full(len(replicas_E), -1, dtype=np.intp)
        if may_E.any():
            present_EK = self._all("counts_EK")[may_E] > 0
            at_once = microbatches.at_once(replicas_E[may_E], left_E[may_E])
            rows, same = distinct([replicas_E[may_E], at_once, *present_EK.T])
            each = []
            for replicas, held, *present in rows.tolist():
                kinds = [kind for kind, there in enumerate(present) if there]
                own = self._runs.class_of(kinds, int(replicas), int(held), 0, readers or 1)
                each.append(classes.setdefault(own, len(classes)))
            numbers_E[may_E] = np.array(each, dtype=np.intp)[same]
        zeros_I = np.zeros(self.spans.num_layers + 1)
        other._kept = []
        for own in classes:
            memory, limit = self._problem.memory, self._runs.limit_bytes(own)
            if memory is None or np.isinf(limit):
                other._kept.append((zeros_I, zeros_I, np.inf))
                continue
            before_I, after_I, weights_I = self._runs.tables.sums(own.kinds)
            each_I = memory.per_parameter_byte(1, replicas=own.replicas) * weights_I
            batches = own.in_flight * own.share
            room = room_bytes(limit) - memory.reserved_bytes
            other._kept.append((each_I + batches * before_I, each_I + batches * after_I, room))
        other._kept.append((zeros_I, zeros_I, -np.inf))  # for stages that are left out
        other.num_rooms = len(other._kept)
        numbers_E[numbers_E < 0] = len(classes)
        other.rooms_E = np.split(numbers_E, self._ends)
        return other

    def kept(self, number: int) -> tuple[Floats, Floats, float]:
        return self._kept[number]


class RecomputingCosts(Costs):
    """Costs of stages whose recomputation adds seconds that depend on where they begin and end.

    ``readers``: number of first-stage devices; None, if memory is not limited: any number.
    """

    by_windows = False

    def __init__(
        self, problem: Problem, lattice: Lattice, runs: RecomputationCosts, *, readers: int | None
    ) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs, self._readers = problem, runs, readers
        classes: dict[StageClass, int] = {}
        self._classes_E = [self._numbers(ways, classes) for ways in lattice.ways]
        self._each = list(classes)

    def _numbers(self, ways: Transitions, classes: dict[StageClass, int]) -> Ints:
        """Index of each stage's class in ``classes``, extended here; -1: a stage to leave out."""
        found = []
        for way, source in enumerate(ways.sources_E.tolist()):
            counts = ways.counts_EK[way].tolist()
            left, stage = int(ways.left_E[way]), self.lattice.nodes[source].stage
            is_last = left == sum(counts)
            others = not source and self._readers not in (None, sum(counts))
            others = others or sum(counts) > self._runs.microbatches.count
            if others or (is_last and stage + 1 < self._problem.distinct_stages):
                found.append(-1)
                continue
            kinds, replicas = [kind for kind, count in enumerate(counts) if count], sum(counts)
            at_once = int(self._runs.microbatches.at_once(replicas, left))
            own = self._runs.class_of(kinds, replicas, at_once, stage, self._readers or 1)
            found.append(classes.setdefault(own, len(classes)))
        return np.array(found, dtype=np.intp)

    def bounds_s(self) -> tuple[float, float]:
        least_s, most_s = super().bounds_s()
        return least_s, (most_s + self._runs.most_s) * (1 + EXACT)

    def times_s(
        self, node: int, ways_P: Ints, begins_P: Ints, ends_J: Ints, bound_s: float
    ) -> Floats:
        """As :meth:`Costs.times_s`, with the seconds of recomputed layers."""
        times_PJ = super().times_s(node, ways_P, begins_P, ends_J, bound_s)
        classes_P = self._classes_E[node][ways_P]
        replicas_P = self.lattice.ways[node].replicas_E[ways_P]
        for number in set(classes_P.tolist()):
            here_P = classes_P == number
            if number < 0:
                times_PJ[here_P] = np.inf
                continue
            more_II = self._runs.seconds_II(self._each[number])
            more_PJ = more_II[begins_P[here_P][:, None], ends_J[None, :]]
            times_PJ[here_P] += more_PJ / replicas_P[here_P][:, None]
        return np.where(times_PJ <= bound_s, times_PJ, np.inf)


def costs_by_readers(
    problem: Problem, lattice: Lattice, runs: RecomputationCosts
) -> Iterator[Costs]:
    """Yields stage costs to search with: for plans with each possible number of first-stage
    devices, largest first, since memory depends on it.

    If any number is possible and memory sets no limit, one set of costs covers all plans.
    """
    assert problem.synchronous is not None
    if problem.synchronous.recomputes:
        for readers in problem.numbers_of_readers:
            yield RecomputingCosts(problem, lattice, runs, readers=readers)
    else:
        of_all = SynchronousCosts(problem, lattice, runs)
        yield from map(of_all.of_readers, problem.numbers_of_readers)
