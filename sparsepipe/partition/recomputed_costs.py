"""The best plan over a lattice of devices where stages recompute layers.

What a stage takes is no difference of sums then, so that each pair of a begin and an end is looked
at, as for branching graphs. The sizes of microbatches depend on the number of devices of the first
stage: plans are searched for one such number after another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs import Costs, Ints
from sparsepipe.partition.evaluate import plan_times
from sparsepipe.partition.lattice import Lattice, Ways
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recomputed_plan import MORE_ROOM
from sparsepipe.partition.search import feasible, search
from sparsepipe.partition.second_runs import Chains, SecondRuns, Sort
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import EQUAL, Choice

log = logging.getLogger(__name__)

MOST_ROUNDS = 1000
"""Plans that are counted exactly, at most, for each number of devices of the first stage."""


class PairCosts(Costs):
    """Costs of stages of which each takes some seconds more by its begin and its end.

    Args:
        problem: with what is recomputed.
        lattice: of the devices.
        runs: what that adds.
    """

    by_windows = False

    def __init__(self, problem: Problem, lattice: Lattice, runs: SecondRuns) -> None:
        super().__init__(problem.spans, lattice, problem.model, None)
        self._problem, self._runs = problem, runs
        self._sorts: dict[Sort, int] = {}
        self._sorts_E = [self._numbers(ways) for ways in lattice.ways]
        self._each = list(self._sorts)

    def _numbers(self, ways: Ways) -> Ints:
        """Which sort each stage is of.

        -1: it begins plans of other first stages, ends plans without all stages that the setting
        names, or has too many devices.
        """
        found = []
        for way, source in enumerate(ways.sources_E.tolist()):
            counts = ways.counts_EK[way].tolist()
            left, stage = int(ways.left_E[way]), self.lattice.nodes[source].stage
            is_last = left == sum(counts)
            others = not source and self._runs.readers not in (None, sum(counts))
            others = others or not self._runs.has_work_for(sum(counts))
            if others or (is_last and stage + 1 < self._problem.stages_told):
                found.append(-1)
                continue
            sort = self._runs.sort(counts, left=left, stage=stage)
            found.append(self._sorts.setdefault(sort, len(self._sorts)))
        return np.array(found, dtype=np.intp)

    def bounds_s(self) -> tuple[float, float]:
        """As of :class:`Costs`."""
        least_s, most_s = super().bounds_s()
        return least_s, most_s + self._runs.most_s

    def times_s(
        self, node: int, ways_P: Ints, begins_P: Ints, ends_J: Ints, bound_s: float
    ) -> Floats:
        """As of :class:`Costs`."""
        times_PJ = super().times_s(node, ways_P, begins_P, ends_J, bound_s)
        sorts_P = self._sorts_E[node][ways_P]
        replicas_P = self.lattice.ways[node].replicas_E[ways_P]
        for number in set(sorts_P.tolist()):
            here_P = sorts_P == number
            if number < 0:
                times_PJ[here_P] = np.inf
                continue
            more_II = self._runs.seconds_II(self._each[number])
            more_PJ = more_II[begins_P[here_P][:, None], ends_J[None, :]]
            times_PJ[here_P] += more_PJ / replicas_P[here_P][:, None]
        return np.where(times_PJ <= bound_s, times_PJ, np.inf)

    def plan_s(self, plan: Sequence[Choice]) -> float:
        """Seconds between two minibatches, as far as stages have been counted.

        Args:
            plan: of this lattice.
        """
        problem = self._problem
        stages_s, cuts_s = plan_times(plan, problem.spans, problem.fleet, problem.model)
        more_s = [
            float(self._runs.seconds_II(sort)[stage.first, stage.end]) / sum(stage.counts)
            for sort, stage in zip(sorts_of(plan, self._runs), plan, strict=True)
        ]
        return max(*(s + more for s, more in zip(stages_s, more_s, strict=True)), *cuts_s, 0.0)

    def count(self, plan: Sequence[Choice]) -> None:
        """Has the stages of a plan counted exactly."""
        for sort, stage in zip(sorts_of(plan, self._runs), plan, strict=True):
            self._runs.count(sort, stage.first, stage.end)


def sorts_of(plan: Sequence[Choice], runs: SecondRuns) -> Iterator[Sort]:
    """Which sort each stage of a plan is of."""
    left = sum(sum(stage.counts) for stage in plan)
    for number, stage in enumerate(plan):
        yield runs.sort(stage.counts, left=left, stage=number)
        left -= sum(stage.counts)


class PlanSeconds:
    """What the stages of any plan of a problem take for what they recompute.

    Args:
        problem: with what is recomputed.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._chains = problem, Chains(problem)
        self._runs: dict[int, SecondRuns] = {}

    def __call__(self, plan: Sequence[Choice]) -> list[float]:
        """Seconds of each stage, its replicas sharing them; infinite where it does not fit.

        Of a plan without all stages that the setting names they are infinite, and of one with a
        stage of more devices than there are microbatches.
        """
        most = max(sum(stage.counts) for stage in plan)
        too_many = most > self._chains.recomputing.parts.microbatches
        if len(plan) < self._problem.stages_told or too_many:
            return [float("inf")] * len(plan)
        readers = sum(plan[0].counts)
        if readers not in self._runs:
            self._runs[readers] = SecondRuns(self._chains, self._problem.memory, readers=readers)
        runs = self._runs[readers]
        return [
            runs.count(sort, stage.first, stage.end) / sum(stage.counts)
            for sort, stage in zip(sorts_of(plan, runs), plan, strict=True)
        ]


def best_plan(problem: Problem, lattice: Lattice) -> list[Choice] | None:
    """Stages of the best plan, the first one first; None where no plan fits the memory.

    Of plans that take as long the one whose first stage has more devices is taken, where layers
    are recomputed and memory counts.

    Args:
        problem: what to partition.
        lattice: of its devices.

    Raises:
        PlanError: so many plans were counted that the search stopped, and none of them fits.
    """
    if problem.recomputing is None:
        return search(Costs(problem.spans, lattice, problem.model, problem.memory))
    best: list[Choice] | None = None
    best_s, ended = float("inf"), True
    for costs in _by_readers(problem, lattice, Chains(problem)):
        for _ in range(MOST_ROUNDS):
            found = search(costs)
            # What is promised is a bound on all plans that have not been counted.
            if found is None or costs.plan_s(found) >= best_s * (1 - EQUAL):
                break
            costs.count(found)
            if (time_s := costs.plan_s(found)) < best_s * (1 - EQUAL):
                best, best_s = found, time_s
            if not problem.recomputing.is_automatic:
                break  # all was counted exactly before
        else:
            ended = False
    if not ended:
        _check_found(best)
    return best


def _check_found(best: list[Choice] | None) -> None:
    """Says that the search was broken off; refuses to say that nothing fits."""
    if best is not None:
        log.warning(
            "the search has counted %s plans to the end and stops: another one may be faster",
            f"{MOST_ROUNDS:,}",
        )
        return
    raise PlanError(
        f"the search has counted {MOST_ROUNDS:,} plans to the end, none of which fits the memory, "
        "and stops: another one may",
        remedy=f"say which layers to recompute, as numbers or all; or use {MORE_ROOM}",
    )


def any_fits(
    problem: Problem,
    lattice: Lattice,
    *,
    more_bytes: float = 0.0,
    chains: Chains | None = None,
) -> bool:
    """Whether any plan fits the memory, as far as bounds tell where layers are to be chosen.

    Args:
        problem: what to partition.
        lattice: of its devices.
        more_bytes: that each device is taken to hold beyond its limit.
        chains: of a problem with the same layers, for what they know already.
    """
    if problem.recomputing is not None:
        own = Chains(problem) if chains is None else chains.of(problem)
        every = _by_readers(problem, lattice, own, more_bytes=more_bytes)
        return any(map(feasible, every))
    memory, model = problem.memory, problem.model
    return feasible(Costs(problem.spans, lattice, model, memory, more_bytes=more_bytes))


def _numbers_of_readers(problem: Problem) -> Sequence[int | None]:
    assert problem.recomputing is not None
    if problem.memory is None:
        return [None]
    most = min(problem.recomputing.parts.microbatches, problem.fleet.num_devices)
    return range(most, 0, -1)


def _by_readers(
    problem: Problem, lattice: Lattice, chains: Chains, *, more_bytes: float = 0.0
) -> Iterator[PairCosts]:
    """The costs of plans with each number of devices of the first stage.

    Where memory does not count these change nothing: the costs of all plans.
    """
    for readers in _numbers_of_readers(problem):
        runs = SecondRuns(chains, problem.memory, readers=readers, more_bytes=more_bytes)
        yield PairCosts(problem, lattice, runs)
