"""The best plan of a synchronous pipeline: exact, as long as there is work left for it.

As in ``search.py`` the least bottleneck is found by bisection, of questions whether some plan keeps
to a bound on all times. Where the memory chooses what a stage recomputes (``auto``), times are
bounds themselves at first. Where a plan keeps to a bound by these, layers to recompute are looked
for with which its stages do so, one by one, until there are none for one of them; then the question
is asked again, and that stage is no answer any more. So each answer is one about what stages really
take, and layers are looked for of few of them.

Plans are looked for with one number of devices of the first stage after another, each of which has
but to tell whether it has a better one than those before. How much all of them look at is limited
(``work.py``): a search that ends before it knows tells how far the best plan may be from its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from sparsepipe.partition.activation_checkpointing.selection import no_more_work
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.activation_checkpointing.work import MOST_LOOKS, Work
from sparsepipe.partition.costs.model import EQUAL, EXACT
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.checkpointed_stages import LayerTables, SecondRuns
from sparsepipe.partition.search.lattice import Lattice
from sparsepipe.partition.search.reachability import TINY_S, best_tied, between_s, reaches, search
from sparsepipe.partition.search.stage_costs import (
    Bools,
    Costs,
    PairCosts,
    PlainCosts,
    costs_by_readers,
    plain_costs,
)

log = logging.getLogger(__name__)

_Counted = PairCosts | PlainCosts

_NEAR = 1.1
"""Where a plan takes no more than so many times what all do, every other question is whether any is
better at all."""


def best_plan(
    problem: Problem, lattice: Lattice, work: Work | None = None
) -> tuple[list[Choice], StageSpans | None] | None:
    """Stages of the best plan, the first one first, and the layers that it chooses for them.

    Of plans that take as long the one whose first stage has more devices is taken, where layers
    are recomputed and memory counts; but for one that is found as the search comes back to such
    stages, having had no work left for them at first.

    Args:
        problem: what to partition.
        lattice: of its devices.
        work: that may be done; None: ``MOST_LOOKS`` where the memory chooses layers, else any.

    Returns:
        None where no plan fits the memory, and no layers where that does not choose them. What is
        left of the work goes into cheaper layers of stages that have some.

    Raises:
        PlanError: the search has looked at as much as it may, and at no plan that fits.
    """
    if problem.synchronous is None:
        stages = search(Costs(problem.spans, lattice, problem.model, problem.memory))
        return None if stages is None else (stages, None)
    if not problem.synchronous.recomputes:
        return _best_plain(problem, lattice)
    if work is None:
        work = Work(MOST_LOOKS) if problem.synchronous.is_automatic else Work()
    runs = SecondRuns(LayerTables(problem, work), problem.memory)
    hunts = [_Hunt(costs, work) for costs in costs_by_readers(problem, lattice, runs)]
    best: _Best | None = None
    waiting = hunts
    while waiting and not work.is_all_done:
        for number, hunt in enumerate(waiting):
            work.allow(turns=len(waiting) - number)
            best = hunt.go_on(best)
        waiting = [hunt for hunt in hunts if hunt.may_beat(best)]
    if waiting:
        _tell_of_end(best, min(hunt.least_s for hunt in waiting))
    if best is None:
        return None
    stages = _first_of_equal(best, work)
    return stages, runs.spans(stages)


def _best_plain(problem: Problem, lattice: Lattice) -> tuple[list[Choice], None] | None:
    """The same where no layer is recomputed: each hunt ends with the answer, one after another."""
    best: _Best | None = None
    for costs in plain_costs(problem, lattice, SecondRuns(LayerTables(problem), problem.memory)):
        best = _Hunt(costs, Work()).go_on(best)
    return None if best is None else (_first_of_equal(best, Work()), None)


@dataclass(frozen=True, slots=True, eq=False)
class _Best:
    """The best plan so far.

    Attributes:
        plan: its stages.
        time_s: between two minibatches, with layers to recompute that are known to fit.
        costs: by which it was found.
    """

    plan: list[Choice]
    time_s: float
    costs: _Counted


class _Hunt:
    """Looks for a better plan among those with some number of devices of the first stage.

    Args:
        costs: of these.
        work: that may be done for it.

    Attributes:
        least_s: that all of them take; infinite where there is none.
    """

    def __init__(self, costs: _Counted, work: Work) -> None:
        self._costs, self._work, self._windows = costs, work, reaches(costs)
        least_s, self._most_s = costs.bounds_s()
        self.least_s = max(least_s, TINY_S)  # that times are halved to, and none is below
        self._found: _Best | None = None

    def may_beat(self, best: _Best | None) -> bool:
        """Whether there may be a better plan here than the best one of all."""
        if best is None:
            return self.least_s < float("inf")
        return self._most(best) > self.least_s * (1 + EXACT)

    def go_on(self, best: _Best | None) -> _Best | None:
        """Asks until there is no better plan here, or no more work may be done.

        Every other question at least halves the ratio of what a better plan may take to what all
        do, or their distance, whatever the answer.

        Args:
            best: of all hunts.

        Returns:
            The same, or a better one.
        """
        is_any_better = True  # is what is asked; or by how much
        while self.may_beat(best):
            most_s = self._most(best)
            bound_s = most_s if is_any_better else between_s(self.least_s, most_s)
            answer = self._keeps_to(bound_s)
            if answer:
                best = self._found
            elif answer is False:
                self.least_s = bound_s if bound_s < self._most_s else float("inf")
            if self._work.is_done:
                break
            is_any_better = not is_any_better and most_s < _NEAR * self.least_s
        return best

    def _most(self, best: _Best | None) -> float:
        """What a plan may take that is better; one of other costs has to be so by more."""
        if best is None:
            return self._most_s
        share = EXACT if best is self._found else EQUAL
        return min(self._most_s, best.time_s * (1 - share))

    def _keeps_to(self, bound_s: float) -> bool | None:
        """Whether some plan does, which is found then; None: that takes more work than there is.

        Each plan that does not, once its stages are counted, rules one of them out for the bound.
        """
        costs = self._costs
        while True:
            reached_VI = self._windows.reached(bound_s)
            if not reached_VI[costs.lattice.last, -1].any():
                return False
            plan = list(_back(costs, reached_VI, bound_s))[::-1]
            if costs.keeps_to(plan, bound_s):
                self._found = _Best(plan, costs.plan_s(plan), costs)
                return True
            if self._work.is_done:
                return None


def _back(costs: _Counted, reached_VI: Bools, bound_s: float) -> Iterator[Choice]:
    """The stages of a plan that keeps to a bound, the last one first.

    Of those that may end at a place the one is taken that takes least time.

    Args:
        costs: of plans.
        reached_VI: places by nodes of the lattice that some stages reach.
        bound_s: of their times.
    """
    node, place = next(n for n in costs.lattice.last if reached_VI[n, -1]), reached_VI.shape[1] - 1
    while node:
        ways = costs.lattice.ways[node]
        sources_E = ways.sources_E
        ways_P, begins_P = np.nonzero(reached_VI[sources_E, :place])
        times_P1 = costs.times_s(node, ways_P, begins_P, np.array([place]), bound_s)
        pair = int(times_P1[:, 0].argmin())
        assert np.isfinite(times_P1[pair, 0]), "some stage has reached the place"
        way, first = int(ways_P[pair]), int(begins_P[pair])
        yield Choice(first=first, end=place, counts=tuple(map(int, ways.counts_EK[way])))
        node, place = int(sources_E[way]), first


def _first_of_equal(best: _Best, work: Work) -> list[Choice]:
    """Of plans that take as long the one that goes before others (``ties.py``).

    It is the one that was found where that takes more than a small part of the work that is left.
    """
    work.allow(turns=10)
    while not work.is_done:
        plan = best_tied(best.costs, reaches(best.costs), best.time_s)
        if best.costs.keeps_to(plan, best.time_s * (1 + EQUAL)):
            return plan
    return best.plan


def _tell_of_end(best: _Best | None, least_s: float) -> None:
    """Says that a search was broken off.

    Raises:
        PlanError: it has no plan; that none fits the memory would be said too much.
    """
    if best is None:
        raise no_more_work()
    log.warning(
        "the search has looked at as much as it may and stops: its plan is not proven to be the "
        "best one; another one may take up to %.1f %% less time",
        ceil(1000 * (1 - least_s / best.time_s)) / 10,
    )
