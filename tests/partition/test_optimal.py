"""The searches find what trying all plans finds, ties included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from instances import random_problem, tight_problem

from sparsepipe.errors import PlanError
from sparsepipe.partition import exhaustive as brute
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.searches import exact, hete_mp
from sparsepipe.partition.ties import Choice

QUICK, ALL = range(120), range(120, 500)


Draw = Callable[[int], tuple[Problem, list[int]]]


def all_plans(problem: Problem, order: list[int] | None = None) -> list[Choice] | None:
    return brute.exhaustive(
        problem.spans, problem.fleet, problem.model, problem.memory, order=order
    )


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
        kinds = problem.fleet.kinds
        names = [f"{kinds[k].host}/{kinds[k].name}" for k in order]
        sorted_ = all_plans(problem, order)
        assert found_by(hete_mp, problem, order=names) == sorted_, f"hete_mp, seed {seed}"
        assert found_by(exact, problem) == all_plans(problem), f"exact, seed {seed}"
        without += sorted_ is None
    return without


def test_what_trying_all_plans_finds() -> None:
    assert 0 < check(QUICK) < len(QUICK) / 4


def test_limits_of_just_what_a_plan_keeps() -> None:
    assert check(QUICK, tight_problem) == 0, "the plan that keeps it is one"


@pytest.mark.full
def test_what_trying_all_plans_finds_in_many_more_cases() -> None:
    assert 0 < check(ALL) < len(ALL) / 4
    assert check(ALL, tight_problem) == 0
