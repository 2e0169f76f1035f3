"""Costs of plans whose stages recompute layers.

What a stage takes is no difference of sums then, so that each pair of a begin and an end is looked
at, as for branching graphs. The sizes of microbatches depend on the number of devices of the first
stage: plans are searched for one such number after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sparsepipe.partition.costs import Costs, Ints
from sparsepipe.partition.evaluate import plan_times
from sparsepipe.partition.lattice import Lattice, Ways
from sparsepipe.partition.layer_tables import LayerTables
from sparsepipe.partition.plain_costs import plain_costs
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.second_runs import SecondRuns, StageClass
from sparsepipe.partition.search import EXACT, feasible
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import Choice


class PairCosts(Costs):
    """Costs of stages of which each takes some seconds more by its begin and its end.

    Args:
        problem: with what is recomputed.
        lattice: of the devices.
        runs: what that adds.
        readers: devices of the first stage; None: any number, where memory does not count.
    """

    by_windows = False

    def __init__(
        self, problem: Problem, lattice: Lattice, runs: SecondRuns, *, readers: int | None
    ) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs, self._readers = problem, runs, readers
        classes: dict[StageClass, int] = {}
        self._classes_E = [self._numbers(ways, classes) for ways in lattice.ways]
        self._each = list(classes)

    def _numbers(self, ways: Ways, classes: dict[StageClass, int]) -> Ints:
        """Which class each stage is of.

        -1: it begins plans of other first stages, ends plans without all stages that the setting
        names, or has too many devices.
        """
        found = []
        for way, source in enumerate(ways.sources_E.tolist()):
            counts = ways.counts_EK[way].tolist()
            left, stage = int(ways.left_E[way]), self.lattice.nodes[source].stage
            is_last = left == sum(counts)
            others = not source and self._readers not in (None, sum(counts))
            others = others or not self._runs.has_work_for(sum(counts))
            if others or (is_last and stage + 1 < self._problem.stages_told):
                found.append(-1)
                continue
            readers = self._readers or 1
            own = self._runs.class_of(counts, left=left, stage=stage, readers=readers)
            found.append(classes.setdefault(own, len(classes)))
        return np.array(found, dtype=np.intp)

    def bounds_s(self) -> tuple[float, float]:
        """As of :class:`Costs`."""
        least_s, most_s = super().bounds_s()
        return least_s, (most_s + self._runs.most_s) * (1 + EXACT)

    def times_s(
        self, node: int, ways_P: Ints, begins_P: Ints, ends_J: Ints, bound_s: float
    ) -> Floats:
        """As of :class:`Costs`; at least, where layers are to be chosen."""
        times_PJ = super().times_s(node, ways_P, begins_P, ends_J, bound_s)
        self._runs.work.look_at_pairs(times_PJ.size)
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

    def keeps_to(self, plan: Sequence[Choice], bound_s: float) -> bool:
        """Whether the stages of a plan do so when they are counted; what comes of it is known then.

        Where one does not, :meth:`times_s` is above the bound for it from then on, unless the work
        is done: what stages take alone is added up as there, and the slack is far above rounding.

        Args:
            plan: of this lattice, which keeps to the bound by :meth:`times_s`.
            bound_s: of their times.
        """
        most_s, runs = bound_s * (1 + EXACT / 4), self._runs
        return all(
            runs.keeps_to(
                own,
                stage.first,
                stage.end,
                most_s=(most_s - self._alone_s(stage)) * sum(stage.counts),
            )
            for own, stage in zip(runs.classes_of(plan), plan, strict=True)
        )

    def plan_s(self, plan: Sequence[Choice]) -> float:
        """Seconds between two minibatches, at most.

        Args:
            plan: of this lattice, with layers to recompute for each stage that are known to fit.
        """
        problem, runs = self._problem, self._runs
        _, cuts_s = plan_times(plan, problem.spans, problem.fleet, problem.model)
        times_s = [
            self._alone_s(stage) + runs.at_most(own, stage.first, stage.end) / sum(stage.counts)
            for own, stage in zip(runs.classes_of(plan), plan, strict=True)
        ]
        return max(*times_s, *cuts_s, 0.0)

    def _alone_s(self, stage: Choice) -> float:
        """What a stage takes that recomputes nothing, to the bit as :meth:`times_s` has it."""
        replicas, speed = sum(stage.counts), self.lattice.fleet.sync_bytes_per_s(stage.counts)
        rows = [self.rows[kind, replicas, speed] for kind, n in enumerate(stage.counts) if n]
        sums_R = self.sums_RI[rows, stage.end] - self.sums_RI[rows, stage.first]
        return float(sums_R.max()) / replicas


class PlanSeconds:
    """What the stages of any plan of a problem take for what they recompute.

    Args:
        problem: with what is recomputed.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._runs = SecondRuns(LayerTables(problem), problem.memory)

    def __call__(self, plan: Sequence[Choice]) -> list[float]:
        """Seconds of each stage, its replicas sharing them; infinite where it does not fit.

        Of a plan without all stages that the setting names they are infinite, and of one with a
        stage of more devices than there are microbatches.
        """
        most = max(sum(stage.counts) for stage in plan)
        if len(plan) < self._problem.stages_told or not self._runs.has_work_for(most):
            return [float("inf")] * len(plan)
        runs = self._runs
        return [
            runs.count(own, stage.first, stage.end) / sum(stage.counts)
            for own, stage in zip(runs.classes_of(plan), plan, strict=True)
        ]


def any_fits(
    problem: Problem,
    lattice: Lattice,
    *,
    more_bytes: float = 0.0,
    tables: LayerTables | None = None,
) -> bool:
    """Whether any plan fits the memory, as far as bounds tell where layers are to be chosen.

    Args:
        problem: what to partition.
        lattice: of its devices.
        more_bytes: that each device is taken to hold beyond its limit.
        tables: of a problem with the same layers, for what they know already.
    """
    if problem.synchronous is not None:
        own = LayerTables(problem) if tables is None else tables.of(problem)
        runs = SecondRuns(own, problem.memory, more_bytes=more_bytes)
        every: Iterator[Costs] = (
            costs_by_readers(problem, lattice, runs)
            if problem.synchronous.recomputes
            else plain_costs(problem, lattice, runs)
        )
        return any(map(feasible, every))
    memory, model = problem.memory, problem.model
    return feasible(Costs(problem.spans, lattice, model, memory, more_bytes=more_bytes))


def costs_by_readers(problem: Problem, lattice: Lattice, runs: SecondRuns) -> Iterator[PairCosts]:
    """The costs of plans with each number of devices of the first stage, the largest first.

    Where memory does not count these change nothing: the costs of all plans.
    """
    for readers in problem.numbers_of_readers:
        yield PairCosts(problem, lattice, runs, readers=readers)
