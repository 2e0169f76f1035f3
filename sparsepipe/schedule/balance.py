"""Cuts that share a per-layer cost evenly over stages, whatever the cost counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from sparsepipe.errors import PlanError


def balanced(costs: Sequence[float], replicas: Sequence[int]) -> list[int]:
    """The first layer of each stage but the first, so that the dearest stage is cheapest.

    A stage costs the sum of its layers divided by its replicas. Exact (dynamic program over
    stages and last layers). Of equal solutions the one that shares what is left most evenly
    over devices (least sum of squares), and of those the one with the latest cuts: layers
    that cost nothing, such as activations and pooling, stay behind the layer they follow.

    Args:
        costs: of each layer, at least 0.
        replicas: of each stage, at least 1.

    Raises:
        PlanError: there are more stages than layers.
    """
    layers, stages = len(costs), len(replicas)
    if stages > layers:
        raise PlanError(
            f"{stages} stages for {layers} layers",
            remedy="use at most as many stages as there are layers",
        )
    sums = [0.0, *accumulate(costs)]

    def load(stage: int, first: int, end: int) -> float:
        return (sums[end] - sums[first]) / replicas[stage]

    dearest, _ = _best_cuts(layers, stages, load, max)

    def squares(stage: int, first: int, end: int) -> float:
        each = load(stage, first, end)
        return math.inf if each > dearest else replicas[stage] * each**2

    return _best_cuts(layers, stages, squares, operator.add)[1]


def _best_cuts(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Least cost of all stages and its cuts; the latest ones of equal cost.

    Args:
        layers: how many.
        stages: how many.
        cost: of a stage that begins with one layer and ends before another.
        combine: costs of the stages before, and of one more; rises with both.
    """
    best: dict[int, tuple[float, list[int]]] = {
        end: (cost(0, 0, end), []) for end in range(1, layers + 1)
    }
    for stage in range(1, stages):
        best = {
            end: min(
                (
                    (combine(best[cut][0], cost(stage, cut, end)), [*best[cut][1], cut])
                    for cut in range(end - 1, stage - 1, -1)
                ),
                key=lambda found: found[0],
            )
            for end in range(stage + 1, layers + 1)
        }
    return best[layers]
