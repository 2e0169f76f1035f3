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
from sparsepipe.partition.size import MOST_WINDOWS
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import Choice

_ROUNDING = 1e-12
"""Of all that is kept, far above what sums of bytes differ by for being rounded."""


class PlainCosts(Costs):
    """Costs of stages that keep what their microbatches in flight need, and recompute nothing.

    What is kept is a difference of sums. So the begins that fit an end follow one another, if no
    stage keeps less than one that begins later; else each pair of a begin and an end is looked at.
    Where there are too many of these, a stage is taken to keep as much as such a later one.

    Args:
        problem: a chain of layers.
        lattice: of its devices.
        runs: which stages keep as much, and what devices hold.
    """

    def __init__(self, problem: Problem, lattice: Lattice, runs: SecondRuns) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs = problem, runs
        pairs = sum(len(ways.sources_E) for ways in lattice.ways) * problem.spans.num_layers**2
        self._too_many = pairs > MOST_WINDOWS
        self._classes: list[StageClass] = []
        self._kept: list[tuple[Floats, Floats, float]] = []

    def of_readers(self, readers: int | None) -> PlainCosts:
        """The same of plans whose first stage has so many devices.

        Args:
            readers: how many; None: any number, where memory does not count.
        """
        other = copy(self)
        other._set_classes(readers)
        kept = [other._kept_by(own) for own in other._classes]
        rising = [_never_falls(before_I, after_I) for before_I, after_I, _ in kept]
        other.by_windows = all(rising) or self._too_many
        if other.by_windows:
            kept = [(_rising(before_I), after_I, room) for before_I, after_I, room in kept]
        zeros_I = np.zeros(self.spans.num_layers + 1)
        other._kept = [*kept, (zeros_I, zeros_I, -np.inf)]  # the last one is of no plan
        other.num_rooms = len(other._kept)
        return other

    def _set_classes(self, readers: int | None) -> None:
        """Which class each stage is of; behind the last of them, what is left out."""
        replicas_E, left_E = self._all("replicas_E"), self._all("left_E")
        may_E = self._runs.may_have_work(replicas_E)
        if readers is not None:
            is_first_E = left_E == sum(self.lattice.all_used)
            may_E &= ~is_first_E | (replicas_E == readers)
        classes: dict[StageClass, int] = {}
        numbers_E = np.full(len(replicas_E), -1, dtype=np.intp)
        if may_E.any():
            present_EK = self._all("counts_EK")[may_E] > 0
            rows, same = distinct([replicas_E[may_E], left_E[may_E], *present_EK.T])
            each = []
            for replicas, left, *present in rows.tolist():
                own = self._runs.class_with(
                    [kind for kind, there in enumerate(present) if there],
                    replicas=int(replicas),
                    left=int(left),
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


def _never_falls(before_I: Floats, after_I: Floats) -> bool:
    """Whether no stage keeps less than one that begins later, but for rounding."""
    return bool((np.diff(before_I) >= -_ROUNDING * after_I[-1]).all())


def _rising(before_I: Floats) -> Floats:
    """What never falls, and is nowhere more."""
    least_I: Floats = np.minimum.accumulate(before_I[::-1])[::-1]
    return least_I
