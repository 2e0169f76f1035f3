"""Searches that count what stages recompute, beside trying all plans and all choices of layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.costs.model import plan_times
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import (
    exact,
    exhaustive,
    hete_mp,
    mp,
    straight,
    variance,
)
from sparsepipe.partition.search.bisection import best_plan
from sparsepipe.partition.search.checkpointed_stages import RecomputationCosts, recomputation_of
from sparsepipe.partition.search.lattice import Lattice, subsets
from tests.support.instances import random_problem
from tests.support.recomputing_instances import (
    least_s,
    network_of,
    problem_of,
    random_recomputing,
    seconds_of,
)

SETTINGS: dict[str, Any] = {
    "none": "none",
    "auto": "auto",
    "all": "all",
    "layers": {"layers": [[0, 0], [2, 2]]},
    "stages": {"stages": [0]},
    "both": {"stages": [1], "layers": [[1, 1]]},
}


def fits_layers(problem: Problem, setting: Any) -> bool:
    """Whether the model has the layers that a setting names."""
    named = [layer for layer, _ in setting.get("layers", [])] if isinstance(setting, dict) else []
    return max(named, default=0) < problem.spans.num_layers


def time_of(found: Any, problem: Problem, **options: Any) -> float:
    """Of what a search finds, by trying all choices; infinite where it finds none.

    It is what comes of the layers that are chosen for its plan, or named.
    """
    try:
        plan = found(problem, **options).stages
    except PlanError:
        return float("inf")
    stages_s, cuts_s = plan_times(plan, problem.spans, problem.pool, problem.model)
    more_s = recomputation_of(plan, problem).times_s
    each = zip(stages_s, more_s, plan, strict=True)
    told_s = max([s + more / sum(stage.counts) for s, more, stage in each] + cuts_s)
    assert told_s == pytest.approx(seconds_of(problem, plan))
    return told_s


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 100), marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_searches_find_the_best_of_all_plans_and_choices(name: str, seeds: range) -> None:
    setting, outcomes = SETTINGS[name], Counter[str]()
    for seed in seeds:
        problem, order = random_recomputing(seed, setting)
        if not fits_layers(problem, setting):
            continue
        kinds = problem.pool.kinds
        names = [f"{kinds[kind].host}/{kinds[kind].name}" for kind in order]
        best_s, sorted_s = least_s(problem), least_s(problem, order)
        assert time_of(exact, problem) == pytest.approx(best_s), seed
        assert time_of(exhaustive, problem) == pytest.approx(best_s), seed
        assert time_of(hete_mp, problem, order=names) == pytest.approx(sorted_s), seed
        outcomes["none" if best_s == float("inf") else "some"] += 1
    assert min(outcomes["none"], outcomes["some"]) > 0, outcomes


def test_the_explanation_has_the_costs_of_the_search() -> None:
    recomputed = 0
    for seed in range(30):
        problem, _ = random_recomputing(seed, "auto")
        try:
            solution = exact(problem)
        except PlanError:
            continue
        chosen = recomputation_of(solution.stages, problem)
        told = explain(problem, solution, chosen)
        assert told.bottleneck_s == pytest.approx(least_s(problem)), seed
        assert all(
            (row.memory_bytes or 0.0) <= (row.memory_limit_bytes or 0.0) * (1 + 1e-8)
            for row in told.rows
        )
        plan = as_plan(problem, told)
        assert plan.details["bottleneck_s"] == told.bottleneck_s
        assert ("recomputed" in plan.details) == any(chosen.spans)
        recomputed += any(chosen.spans)
    assert recomputed > 2


def test_layers_that_are_chosen_need_no_more_than_those_that_are_named() -> None:
    for seed in range(15):
        free, fixed = random_recomputing(seed, "auto")[0], random_recomputing(seed, "all")[0]
        assert time_of(exact, free) <= time_of(exact, fixed) * (1 + 1e-9), seed


@pytest.mark.parametrize("name", ["none", "auto", "all", "layers"])
def test_heuristics_keep_to_the_memory(name: str) -> None:
    """A plan of any search fits; one for each device is never beaten by another such search."""
    setting, fitting, refused = SETTINGS[name], 0, 0
    for seed in range(40):
        problem, _ = random_recomputing(seed, setting)
        devices = problem.pool.num_devices
        if not fits_layers(problem, setting) or devices > problem.spans.num_layers:
            continue
        device = problem.pool.kinds[0].name
        best_s = time_of(straight, problem)
        for found in (mp, variance):
            try:
                stages = found(problem, device=device).stages
            except (PlanError, ConfigError):
                # With equal devices mp looks at as many plans as exact; variance ignores memory.
                refused += 1
                alike = len(problem.pool.kinds) == 1 and found is mp
                assert not alike or time_of(exact, problem) == float("inf"), seed
                continue
            recomputation_of(stages, problem)
            assert seconds_of(problem, stages) < float("inf"), (found, seed)
            fitting += 1
            if len(stages) == devices:
                assert best_s <= seconds_of(problem, stages) * (1 + 1e-9), (found, seed)
    assert fitting > 5
    assert refused > 0


@pytest.mark.parametrize("told", [1, 2])
def test_distinguishing_stages_changes_no_plan(told: int) -> None:
    for seed in range(60):
        problem, _ = random_problem(seed)
        counts = subsets(problem.pool)
        lattices = (Lattice(problem.pool, counts, distinct_stages=n) for n in (0, told))
        one, other = (best_plan(problem, lattice) for lattice in lattices)
        assert one == other, seed


@pytest.mark.full
def test_a_whole_network_on_unlike_devices() -> None:
    """As deep as a VGG16: few plans have to be counted, and no cuts nearby are better."""
    problem = network_of(52)
    found = straight(problem).stages
    chosen = recomputation_of(found, problem)
    assert any(chosen.spans)
    rooms = zip(chosen.peaks_bytes, chosen.rooms_bytes, strict=True)
    assert all(peak <= room * (1 + 1e-8) for peak, room in rooms)
    seconds = RecomputationCosts(problem).seconds_s

    def time_s(plan: list[Choice]) -> float:
        stages_s, cuts_s = plan_times(plan, problem.spans, problem.pool, problem.model)
        return max(*(a + b for a, b in zip(stages_s, seconds(plan), strict=True)), *cuts_s)

    best_s = time_s(list(found))
    for number in range(1, len(found)):
        for step in (-2, -1, 1, 2):
            other = list(found)
            cut = other[number].first + step
            other[number - 1] = replace(other[number - 1], end=cut)
            other[number] = replace(other[number], first=cut)
            assert time_s(other) >= best_s * (1 - 1e-9)
    assert time_s(list(hete_mp(problem).stages)) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("setting", "cuts", "bottleneck_s"),
    [
        ("none", [2], 6.0),
        ({"layers": []}, [2], 6.0),
        ("all", [2], 10.0),
        ({"stages": [0]}, [1], 9.0),
        ({"stages": [1]}, [3], 9.0),
        ({"layers": [[0, 1]]}, [2], 10.0),
        ({"layers": [0]}, [2], 8.0),
        ({"stages": [0], "layers": [3]}, [2], 10.0),
        ({"stages": [0], "layers": [1]}, [1], 11.0),  # though 10 s if layer 1 were named once
    ],
)
def test_second_runs_move_the_cut(setting: Any, cuts: list[int], bottleneck_s: float) -> None:
    """Of four layers alike, of 2 s forward and 1 s backward, on a device for each of two stages."""
    problem = problem_of([[{"forward_s": 2.0, "backward_s": 1.0}] * 4], limits=[], setting=setting)
    solution = straight(problem)
    assert [stage.first for stage in solution.stages[1:]] == cuts
    told = explain(problem, solution, recomputation_of(solution.stages, problem))
    assert told.bottleneck_s == bottleneck_s
    assert told.dp_s == 6.0, "which recomputes nothing"
