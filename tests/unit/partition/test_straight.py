"""A stage for each device, with the fastest slowest stage."""

from __future__ import annotations

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.model import bottleneck_s
from sparsepipe.partition.memory import fits
from sparsepipe.partition.problem import as_uniform
from sparsepipe.partition.search.algorithms import straight
from tests.support.instances import on_one_host, random_problem, spans_alone, tight_problem
from tests.unit.partition.test_baselines_variance import every_plan


def test_it_is_faster_than_the_least_variance() -> None:
    found = straight(on_one_host(spans_alone([[1.0, 1.0, 3.0, 5.0, 1.0]]), {"A": 3}))
    assert [stage.end for stage in found.stages] == [3, 4, 5]  # 5, 5 and 1 second
    assert found.strategy == "straight"
    assert found.config == "1-1-1"


@pytest.mark.parametrize("draw", [random_problem, tight_problem])
def test_it_is_the_best_of_all_plans_of_single_devices(draw: object) -> None:
    outcomes = set()
    for seed in range(60):
        drawn, _ = draw(seed)  # type: ignore[operator]
        problem = as_uniform(drawn, drawn.pool.kinds[0].name)
        plans = every_plan(problem)
        fitting = [p for p in plans if fits(p, problem.spans, problem.pool, problem.memory)]
        outcomes.add((bool(plans), bool(fitting)))
        if not fitting:
            with pytest.raises(PlanError, match="no plan fits" if plans else "as many layers"):
                straight(problem)
            continue
        least = min(
            bottleneck_s(plan, problem.spans, problem.pool, problem.model) for plan in fitting
        )
        found = straight(problem)
        assert bottleneck_s(
            found.stages, problem.spans, problem.pool, problem.model
        ) == pytest.approx(least)
    assert (True, True) in outcomes
