"""The searches find what trying all plans finds, ties included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem, equal_kinds
from sparsepipe.partition.search import exhaustive as brute
from sparsepipe.partition.search.algorithms import exact, hete_mp
from tests.support.instances import (
    MODELS,
    like_problem,
    on_one_host,
    random_problem,
    slices,
    spans_alone,
    tight_problem,
)

QUICK, ALL = range(120), range(120, 500)


Draw = Callable[[int], tuple[Problem, list[int]]]


def all_plans(problem: Problem, order: list[int] | None = None) -> list[Choice] | None:
    pool = problem.pool
    groups = None if order is None else slices(pool, order)
    return brute.exhaustive(problem.spans, pool, problem.model, problem.memory, groups=groups)


def found_by(search: object, *arguments: object, **options: object) -> list[Choice] | None:
    try:
        return list(search(*arguments, **options).stages)  # type: ignore[operator]
    except PlanError:
        return None


def check(seeds: range, draw: Draw = random_problem) -> int:
    """Compares both searches; how many problems have no plan that fits."""
    without = 0
    for seed in seeds:
        problem, order = draw(seed)
        kinds = problem.pool.kinds
        names = [f"{kinds[k].host}/{kinds[k].name}" for k in order]
        sorted_ = all_plans(problem, order)
        if len(set(names)) == len(names):
            assert found_by(hete_mp, problem, order=names) == sorted_, f"hete_mp, seed {seed}"
        assert found_by(exact, problem) == all_plans(problem), f"exact, seed {seed}"
        without += sorted_ is None
    return without


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (100, 200, 300, 400))]
)
def test_searches_find_the_best_of_all_plans(first: int) -> None:
    assert 0 < check(range(first, first + 100)) < 100 / 3


def test_a_bottleneck_that_is_next_to_nothing_beside_the_longest_time() -> None:
    # Each kind takes 1e11 times as long with the layers that it had better not compute.
    fast_s, slow_s = 1e-3, 1e8
    spans = spans_alone([[slow_s, slow_s, 0], [fast_s, fast_s, slow_s]])
    spans = replace(spans, parameter_bytes_I=np.array([0.0, 1e-4, 2e-4, 2e-4]))
    problem = on_one_host(spans, {"A": 1, "B": 2})
    assert exact(problem).config == "1-1-1"
    assert list(exact(problem).stages) == all_plans(problem)


def test_a_plan_that_takes_no_time() -> None:
    spans = replace(spans_alone([[0.0, 0.0]]), parameter_bytes_I=np.array([0.0, 1.0, 2.0]))
    problem = on_one_host(spans, {"A": 2})
    found = exact(problem)
    assert list(found.stages) == all_plans(problem)
    told = explain(problem, found)
    assert (told.solution.config, told.bottleneck_s) == ("1-1", 0.0)
    assert "no time" in told.verdict()


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_counted_before_they_are_tried(seed: int) -> None:
    problem, _ = random_problem(seed)
    layers, pool = problem.spans.num_layers, problem.pool
    every = brute.plans(layers, brute.divisions(pool.counts))
    assert brute.how_many(layers, pool) == sum(1 for _ in every)


@pytest.mark.full
def test_limits_that_a_plan_just_fits() -> None:
    assert check(QUICK, tight_problem) == 0, "the plan that keeps it is one"


def test_devices_that_are_alike_on_several_hosts() -> None:
    few = QUICK[:60]
    assert 0 < check(few, like_problem) < len(few) / 4
    problems = [like_problem(seed)[0] for seed in few]
    fewer = [len(set(equal_kinds(p.pool, p.spans))) < len(p.pool.kinds) for p in problems]
    assert len(few) / 5 < sum(fewer) < len(few)


def test_all_cost_models_limits_and_links_are_drawn() -> None:
    """What the 500 problems are of that the searches are compared on."""
    problems = [random_problem(seed)[0] for seed in (*QUICK, *ALL)]
    models = Counter(problem.model.name for problem in problems)
    assert models.keys() == set(MODELS)
    assert min(models.values()) > 60
    limits = Counter(
        None if m is None else (m.stash, m.predicted, m.optimizer)
        for m in (problem.memory for problem in problems)
    )
    assert limits.keys() == {None, *product((True, False), (True, False), (0.0, 1.0, 2.0))}
    assert 150 < limits[None] < 350
    fleets = Counter((p.pool.is_uniform, len(p.pool.inside)) for p in problems)
    assert fleets.keys() == {(True, 1), (True, 2), (False, 2)}
    assert min(fleets.values()) > 40
    assert {p.spans.num_layers for p in problems} == set(range(1, 9))
    assert {p.pool.num_devices for p in problems} == set(range(1, 6))
    assert {len(p.pool.kinds) for p in problems} == {1, 2, 3}


def test_too_many_plans_are_refused_and_equal_ones_kept_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, _ = random_problem(1)
    number = brute.how_many(problem.spans.num_layers, problem.pool)
    monkeypatch.setattr(brute, "MOST_PLANS", number)
    assert all_plans(problem) == found_by(exact, problem)
    monkeypatch.setattr(brute, "MOST_PLANS", number - 1)
    with pytest.raises(PlanError, match=f"{number:,} plans"):
        all_plans(problem)


@pytest.mark.full
def test_searches_find_the_best_of_all_plans_in_many_more_cases() -> None:
    assert check(ALL, tight_problem) == 0
    rest = range(60, 500)
    assert 0 < check(rest, like_problem) < len(rest) / 4
