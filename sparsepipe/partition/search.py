"""The best plan over a lattice of devices: exact, for stages that follow one another.

The least bottleneck is found by bisection: for a bound on all times, one pass over the lattice
tells which places of the model can be reached with which devices (Eq. 5, as a question of yes
and no). Of the plans that reach it ``ties.py`` chooses one.
"""

from __future__ import annotations

from sparsepipe.partition.costs import Costs
from sparsepipe.partition.ties import Choice, best_tied
from sparsepipe.partition.windows import Masks, Windows, reaches

EXACT = 1e-11
"""Share by which a bottleneck that was found may be above the least one."""

TINY_S = 1e-300
"""What no bottleneck above 0 is below; the ratio to it is halved ten times, whatever the scale."""


def search(costs: Costs) -> list[Choice] | None:
    """Stages of the best plan, the first one first; None where no plan fits the memory."""
    windows = reaches(costs)
    bottleneck_s = _least_bottleneck(costs, windows)
    return None if bottleneck_s is None else best_tied(costs, windows, bottleneck_s)


def feasible(costs: Costs) -> bool:
    """Whether any plan fits the memory."""
    return _feasible(costs, reaches(costs), costs.bounds_s()[1])


def between_s(low_s: float, high_s: float) -> float:
    """Halves the ratio of two times while that is large, the distance when it is small."""
    low_s = max(low_s, TINY_S)
    return low_s**0.5 * high_s**0.5 if high_s > 2 * low_s else (low_s + high_s) / 2


def _least_bottleneck(costs: Costs, windows: Windows | Masks) -> float | None:
    low_s, high_s = costs.bounds_s()
    if not _feasible(costs, windows, high_s):
        return None
    if _feasible(costs, windows, 0.0):
        return 0.0
    low_s = max(low_s, TINY_S)
    while high_s > low_s * (1 + EXACT):
        middle_s = between_s(low_s, high_s)
        if _feasible(costs, windows, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _feasible(costs: Costs, windows: Windows | Masks, bound_s: float) -> bool:
    """Whether some plan keeps all stages and transfers within a bound."""
    return bool(windows.reached(bound_s)[costs.lattice.last, -1].any())
