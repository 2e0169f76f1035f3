"""Costs of plans of a synchronous pipeline whose stages run no layer twice.

A stage keeps what its microbatches in flight need. How large these are depends on the number of
devices of the first stage: plans are searched for one such number after another, where memory
counts. A stage with more devices than there are microbatches is left out: the strategy refuses it.

Shape suffixes: E stages that end at one node of the lattice, or at any, one node after another;
I places a model can be cut at; K kinds of devices; C classes of stages that keep as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np

from sparsepipe.partition.costs import Costs, distinct
from sparsepipe.partition.evaluate import bottleneck_s
from sparsepipe.partition.lattice import Lattice
from sparsepipe.partition.memory import room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.second_runs import SecondRuns, StageClass
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import Choice


class PlainCosts(Costs):
    """Costs of stages that keep what their microbatches in flight need, and recompute nothing.

    Args:
        problem: a chain of layers.
        lattice: of its devices.
        runs: which stages keep as much, and what devices hold.
    """

    def __init__(self, problem: Problem, lattice: Lattice, runs: SecondRuns) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs = problem, runs
        self._classes: list[StageClass] = []
        self._kept: list[tuple[Floats, Floats, float]] = []

    def of_readers(self, readers: int | None) -> PlainCosts:
        """The same of plans whose first stage has so many devices.

        Args:
            readers: how many; None: any number, where memory does not count.
        """
        other = copy(self)
        other._set_classes(readers)
        zeros_I = np.zeros(self.spans.num_layers + 1)
        other._kept = [*map(other._kept_by, other._classes), (zeros_I, zeros_I, -np.inf)]
        other.num_rooms = len(other._kept)
        return other

    def _set_classes(self, readers: int | None) -> None:
        """Which class each stage is of; behind the last of them, what is left out."""
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
                own = self._runs.class_with(
                    [kind for kind, there in enumerate(present) if there],
                    replicas=int(replicas),
                    at_once=int(held),
                    stage=0,
                    readers=readers or 1,
                )
                each.append(classes.setdefault(own, len(classes)))
            numbers_E[may_E] = np.array(each, dtype=np.intp)[same]
        self._classes = list(classes)
        self.rooms_E = self._split(np.where(numbers_E < 0, len(classes), numbers_E))

    def _kept_by(self, own: StageClass) -> tuple[Floats, Floats, float]:
        """As :meth:`kept`."""
        memory, limit = self._problem.memory, self._runs.limit_bytes(own)
        if memory is None or np.isinf(limit):
            zeros_I = np.zeros(self.spans.num_layers + 1)
            return zeros_I, zeros_I, np.inf
        before_I, after_I, weights_I = self._runs.tables.sums(own.kinds)
        each = memory.per_parameter_byte(1, replicas=own.replicas)
        batches = own.in_flight * own.share
        return (
            each * weights_I + batches * before_I,
            each * weights_I + batches * after_I,
            room_bytes(limit) - memory.reserved_bytes,
        )

    def kept(self, number: int) -> tuple[Floats, Floats, float]:
        """As of :class:`Costs`."""
        return self._kept[number]

    def keeps_to(self, plan: Sequence[Choice], bound_s: float) -> bool:
        """Whether the stages of a plan do so: their times are what they take.

        Args:
            plan: of this lattice, which keeps to the bound by :meth:`times_s`.
            bound_s: of their times.
        """
        del plan, bound_s
        return True

    def plan_s(self, plan: Sequence[Choice]) -> float:
        """Seconds between two minibatches.

        Args:
            plan: of this lattice.
        """
        problem = self._problem
        return bottleneck_s(plan, problem.spans, problem.fleet, problem.model)


def plain_costs(problem: Problem, lattice: Lattice, runs: SecondRuns) -> Iterator[PlainCosts]:
    """The costs of plans with each number of devices of the first stage, the largest first.

    Args:
        problem: a chain of layers.
        lattice: of its devices.
        runs: see :class:`PlainCosts`.
    """
    of_all = PlainCosts(problem, lattice, runs)
    yield from map(of_all.of_readers, problem.numbers_of_readers)
