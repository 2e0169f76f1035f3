"""Finds the best plan exactly: a path of stages through a lattice of sets of used devices.

The smallest bottleneck is found by bisection: for a bound on all times, one pass over the lattice
determines which cut positions can be reached with which devices (Eq. 5 as a feasibility test).
Among plans with this bottleneck, :func:`~.reachability.best_of_ties` chooses one.

In a synchronous pipeline, memory depends on the number of devices of the first stage, so plans are
searched for one such number after another. Times include recomputation: exact ones if the setting
names the layers, and approximate ones with ``recompute=auto``.
"""

from __future__ import annotations

from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.costs.model import EQUAL, EXACT
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.checkpointed_stages import RecomputationCosts
from sparsepipe.partition.search.lattice import Lattice
from sparsepipe.partition.search.reachability import (
    ChainReachability,
    PairReachability,
    best_of_ties,
)
from sparsepipe.partition.search.stage_costs import Costs, costs_by_readers

_TINY_S = 1e-300
"""Lower bound of positive bottlenecks in s: bisecting ratios from it soon finds any scale."""


def best_plan(problem: Problem, lattice: Lattice) -> tuple[list[Choice], StageSpans | None] | None:
    """Returns the stages of the best plan and the spans to recompute, which are None unless the
    setting is ``auto``; None instead of both if no plan fits the memory.

    Among equally fast plans of a synchronous pipeline, one with the most first-stage devices wins.
    """
    runs: RecomputationCosts | None = None
    if problem.synchronous is None:
        every = iter([Costs(problem.spans, lattice, problem.model, problem.memory)])
    else:
        runs = RecomputationCosts(problem)
        every = costs_by_readers(problem, lattice, runs)
    best: tuple[float, Costs, ChainReachability | PairReachability] | None = None
    for costs in every:
        # Windows suffice for a chain; pairs are for a graph, or with recomputation.
        by_windows = costs.spans.nested_II is None and costs.by_windows
        windows = ChainReachability(costs) if by_windows else PairReachability(costs)
        most_s = float("inf") if best is None else best[0] * (1 - EQUAL)
        found_s = _least_bottleneck(costs, windows, most_s=most_s)
        if found_s is not None:
            best = found_s, costs, windows
    if best is None:
        return None
    stages = best_of_ties(best[1], best[2], best[0])
    return stages, None if runs is None else runs.spans(stages)


def _least_bottleneck(
    costs: Costs, windows: ChainReachability | PairReachability, *, most_s: float
) -> float | None:
    """Smallest bottleneck of any plan in s; None if none up to ``most_s`` fits the memory."""

    def is_feasible(bound_s: float) -> bool:
        return bool(windows.reached(bound_s)[costs.lattice.last, -1].any())

    low_s, high_s = costs.bounds_s()
    high_s = min(high_s, most_s)
    if not is_feasible(high_s):
        return None
    if is_feasible(0.0):
        return 0.0
    low_s = max(low_s, _TINY_S)
    while high_s > low_s * (1 + EXACT):
        # Halves the ratio of the two times while that is large, the distance when it is small.
        is_far = high_s > 2 * low_s
        middle_s = low_s**0.5 * high_s**0.5 if is_far else (low_s + high_s) / 2
        if is_feasible(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s
