"""The least variance of what stages cost, against all ways to cut the layers."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.costs.layers import Spans, state_spans
from sparsepipe.partition.costs.model import bottleneck_s
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.memory import MemoryModel, fits
from sparsepipe.partition.problem import Problem, as_uniform
from sparsepipe.partition.search.algorithms import best_cuts, hete_mp, variance
from sparsepipe.partition.search.baselines import least_variance
from tests.support.instances import on_one_host, random_problem, spans_alone, tight_problem
from tests.unit.partition.test_states import random_states


def spread(seconds: list[int], bounds: list[int]) -> Fraction:
    """The variance of the stages' sums, exactly."""
    sums = [Fraction(sum(seconds[a:b])) for a, b in pairwise(bounds)]
    mean = sum(sums) / len(sums)
    return sum((one - mean) ** 2 for one in sums) / len(sums)


@pytest.mark.parametrize("seed", range(150))
def test_the_first_of_all_cuts_with_the_least_variance(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(1, 9)
    stages = rng.randint(1, layers)
    # Small numbers, so that many cuts are as good, and layers that take no time.
    seconds = [rng.randint(0, 4 if seed % 2 else 1000) for _ in range(layers)]
    every = [[0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1)]
    best = min(every, key=lambda bounds: (spread(seconds, bounds), bounds))
    scaled = [1e-3 * one for one in seconds]  # sums are rounded
    assert least_variance(spans_alone([scaled]), stages=stages) == best[1:]


def test_it_is_not_the_least_bottleneck() -> None:
    spans = spans_alone([[1.0, 1.0, 3.0, 5.0, 1.0]])
    found = variance(on_one_host(spans, {"A": 3}), device="A")
    assert [stage.end for stage in found.stages] == [2, 3, 5]  # 2, 3 and 6 seconds
    assert hete_mp(on_one_host(spans, {"A": 3})).config == "3"
    assert least_bottleneck(spans) == 5.0  # by 5, 5 and 1 second, which vary more


def least_bottleneck(spans: Spans) -> float:
    """Of three stages of a device each."""
    problem = on_one_host(spans, {"A": 3})
    found = best_cuts(problem, [(1,), (1,), (1,)])
    return bottleneck_s(found.stages, spans, problem.pool, problem.model)


def every_plan(problem: Problem) -> list[list[Choice]]:
    layers, devices = problem.spans.num_layers, problem.pool.num_devices
    bounds = [[0, *cuts, layers] for cuts in combinations(range(1, layers), devices - 1)]
    return [
        [Choice(first=a, end=b, counts=(1,)) for a, b in pairwise(one)]
        for one in bounds
        if len(one) == devices + 1
    ]


@pytest.mark.parametrize("draw", [random_problem, tight_problem])
def test_limits_of_memory_rule_cuts_out(draw: object) -> None:
    outcomes = set()
    for seed in range(80):
        drawn, _ = draw(seed)  # type: ignore[operator]
        problem = as_uniform(drawn, drawn.pool.kinds[0].name)
        compute_I = problem.spans.compute_s_KI[0]
        plans = every_plan(problem)
        fitting = [p for p in plans if fits(p, problem.spans, problem.pool, problem.memory)]
        outcomes.add((bool(plans), bool(fitting), len(fitting) < len(plans)))
        if not fitting:
            with pytest.raises(PlanError, match="no plan fits" if plans else "as many layers"):
                variance(problem, device=problem.pool.kinds[0].name)
            continue

        def squares(plan: list[Choice], compute_I: np.ndarray = compute_I) -> float:
            return float(np.var([compute_I[stage.end] - compute_I[stage.first] for stage in plan]))

        found = variance(problem, device=problem.pool.kinds[0].name)
        assert list(found.stages) in fitting
        least = min(map(squares, fitting))
        assert squares(list(found.stages)) <= least * (1 + 1e-6) + 1e-12
    assert outcomes >= {(True, True, True), (True, True, False), (False, False, False)}


@pytest.mark.parametrize("seed", range(20))
def test_branching_graphs_are_cut_between_their_states(seed: int) -> None:
    spans = state_spans([random_states(random.Random(seed), 1.0)])
    nested_II, compute_I = spans.nested_II, spans.compute_s_KI[0]
    assert nested_II is not None
    last = spans.num_layers
    every = [
        [a, b, last]
        for a in range(1, last)
        for b in range(1, last)
        if nested_II[0, a] and nested_II[a, b] and nested_II[b, last]
    ]
    if not every:
        with pytest.raises(PlanError, match="as many layers"):
            variance(on_one_host(spans, {"A": 3}), device="A")
        return
    found = [stage.end for stage in variance(on_one_host(spans, {"A": 3}), device="A").stages]
    assert found in every
    of = [np.var(np.diff(compute_I[[0, *ends]])) for ends in (found, *every)]
    assert of[0] == pytest.approx(min(of))


def test_unlike_devices_count_as_the_named_one_and_keep_their_order() -> None:
    spans = spans_alone([[1.0, 1.0, 4.0, 2.0], [9.0, 1.0, 1.0, 1.0]])
    problem = on_one_host(spans, {"A": 2, "B": 1})
    assert [s.end for s in variance(problem, device="A").stages] == [2, 3, 4]
    found = variance(problem, device="B")
    assert [s.end for s in found.stages] == [1, 2, 4]
    assert [s.counts for s in found.stages] == [(1, 0), (1, 0), (0, 1)]
    told = explain(problem, found)
    assert told.solution.config == "1-1-1"
    assert told.bottleneck_s == 2.0  # of the last stage, on the device that it really has
    with pytest.raises(ConfigError, match="'C'"):
        variance(problem, device="C")


def test_the_real_devices_must_hold_the_plan() -> None:
    # The device that counts for all keeps nothing; the other one has room for no layer.
    spans = replace(spans_alone([[1.0] * 2] * 2), stored_bytes_I=np.array([0, 8, 16]) * 2.0**20)
    problem = on_one_host(spans, {"A": 1, "B": 1}, memory=MemoryModel())
    kinds = tuple(replace(kind, memory_bytes=20.0 * 2**20) for kind in problem.pool.kinds)
    problem = replace(problem, pool=replace(problem.pool, kinds=kinds))
    assert variance(problem, device="A").config == "1-1"  # 16 MiB in the first, 8 in the second
    small = replace(problem.pool, kinds=(replace(kinds[0], memory_bytes=12.0 * 2**20), kinds[1]))
    with pytest.raises(PlanError, match="no plan fits"):
        variance(replace(problem, pool=small), device="A")
