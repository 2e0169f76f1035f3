"""Searches know that microbatches need samples, which devices of the first stage read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.memory import Microbatches
from sparsepipe.partition.problem import Problem, SynchronousStages
from sparsepipe.partition.search.algorithms import (
    exact,
    exhaustive,
    hete_mp,
    mp,
    straight,
    variance,
)
from tests.support.recomputing_instances import least_s, problem_of, random_recomputing, seconds_of


def cut(problem: Problem, count: int, batch_size: int | None, setting: Any = "none") -> Problem:
    parts = Microbatches(schedule="gpipe", count=count, batch_size=batch_size)
    return replace(problem, synchronous=SynchronousStages(setting=setting, microbatches=parts))


def four_devices(limits: list[float]) -> Problem:
    """With four alike layers, which links so slow split best that devices of a stage sum."""
    layer = {"forward_s": 1.0, "backward_s": 2.0, "saved_bytes": 1.0, "parameter_bytes": 10.0}
    problem = problem_of([[layer] * 4], limits=limits, setting="none")
    four = (replace(problem.pool.kinds[0], count=4),)
    return replace(problem, pool=replace(problem.pool, kinds=four, inside={"h": 1.0}))


@pytest.mark.parametrize("limits", [[], [1e3]], ids=["no limits", "limits"])
@pytest.mark.parametrize(
    ("batch_size", "readers"), [(None, 1), (8, 1), (7, 2), (4, 2), (3, 3), (2, 4)]
)
def test_the_first_stage_has_devices_enough(
    limits: list[float], batch_size: int | None, readers: int
) -> None:
    problem = cut(four_devices(limits), 8, batch_size)
    for found in (hete_mp, exact, exhaustive):
        first = found(problem).stages[0]
        assert sum(first.counts) == readers, "and no more, whose sums take long"
    if limits or readers > 1:
        assert list(problem.numbers_of_readers) == list(range(4, readers - 1, -1))
    else:
        assert problem.numbers_of_readers == [None]


@pytest.mark.parametrize("setting", ["none", "all"])
def test_plans_are_the_best_of_those_whose_microbatches_have_samples(setting: Any) -> None:
    """Beside trying all plans."""
    outcomes = {True: 0, False: 0}
    for seed in range(30):
        problem, _ = random_recomputing(seed, setting)
        assert problem.synchronous is not None
        problem = cut(problem, 4, 2, setting)
        best_s = least_s(problem)
        for found in (exact, exhaustive):
            try:
                found_s = seconds_of(problem, found(problem).stages)
            except PlanError:
                found_s = float("inf")
            assert found_s == pytest.approx(best_s), (seed, found)
        outcomes[best_s < float("inf")] += 1
    assert min(outcomes.values()) > 3, outcomes


@pytest.mark.parametrize(
    ("found", "options", "batch_size", "parts"),
    [
        (straight, {}, 2, 2),
        (variance, {"device": "A"}, 2, 2),
        (hete_mp, {}, 1, 4),
        (mp, {"device": "A"}, 1, 4),
        (exact, {}, 1, 4),
        (exhaustive, {}, 1, 4),
    ],
)
@pytest.mark.parametrize("limits", [[], [1e3]], ids=["no limits", "limits"])
def test_too_few_samples_are_refused(
    found: Any, options: dict[str, str], batch_size: int, parts: int, limits: list[float]
) -> None:
    problem = four_devices(limits)
    with pytest.raises(PlanError, match="devices to read samples") as refused:
        found(cut(problem, 8, batch_size), **options)
    assert "fewer microbatches" in refused.value.remedy
    assert found(cut(problem, parts, batch_size), **options).stages


def test_stages_that_are_named_leave_fewer_devices_to_read() -> None:
    named = {"stages": [2]}
    with pytest.raises(PlanError, match="devices to read samples"):
        hete_mp(cut(four_devices([]), 8, 2, named))
    assert hete_mp(cut(four_devices([]), 4, 2, named)).config == "2-1-1"
