"""Where searches that count what stages recompute stop, and what they say of plans they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.search.algorithms import dp, exact, exhaustive, hete_mp, mp, variance
from sparsepipe.partition.search.baselines import mp_by_levels
from sparsepipe.partition.search.reachability import PairReachability
from tests.support.recomputing_instances import least_s, problem_of, seconds_of


@pytest.mark.parametrize("setting", ["all", {"layers": [[0, 0]]}, "auto"])
def test_first_stages_without_a_better_plan_are_tested_once(
    monkeypatch: pytest.MonkeyPatch, setting: Any
) -> None:
    """The best plan has all four devices in one stage, and is found first."""
    asked: list[float] = []
    reached = PairReachability.reached

    def counted(self: PairReachability, bound_s: float) -> Any:
        asked.append(bound_s)
        return reached(self, bound_s)

    monkeypatch.setattr(PairReachability, "reached", counted)
    questions = []
    for limit in (None, 99.0):
        problem = problem_of(
            [[{"forward_s": 2.0, "backward_s": 1.0}] * 3] * 2,
            limits=[] if limit is None else [limit] * 2,
            setting=setting,
        )
        asked.clear()
        stages = exact(problem).stages
        questions.append(len(asked))
        counting = replace(problem, memory=MemoryModel(stash=False))
        assert seconds_of(counting, stages) == least_s(counting)
    assert questions[1] <= questions[0] + 3


@pytest.mark.parametrize("found", [mp, mp_by_levels, variance])
def test_plans_that_look_at_no_single_device_name_searches_that_do(found: Any) -> None:
    """As by the profile of the large devices, the small ones hold no activations at all."""
    layer = {"forward_s": 2.0, "backward_s": 1.0, "saved_bytes": 8.0}
    none = {**layer, "saved_bytes": 0.0}
    problem = problem_of([[none] * 4, [layer] * 4], limits=[1.0, 1.0], setting="auto")
    with pytest.raises(ConfigError, match="does not fit its devices") as refused:
        found(problem, device="A")
    assert "parallel.strategy.microbatches" in refused.value.remedy
    assert "hete_mp or exact" in refused.value.remedy


@pytest.mark.parametrize("setting", ["none", "auto", "all", {"layers": [0]}])
def test_no_stage_has_more_devices_than_there_are_microbatches(setting: Any) -> None:
    """A single stage would be fastest here, and the strategy refuses it."""
    problem = problem_of([[{"forward_s": 2.0, "backward_s": 1.0}] * 3], limits=[], setting=setting)
    assert problem.synchronous is not None
    assert [sum(stage.counts) for stage in exact(problem).stages] == [2]
    alone = replace(problem.synchronous.microbatches, count=1)
    one = replace(problem.synchronous, microbatches=alone)
    for memory in (None, MemoryModel(stash=False)):
        few = replace(problem, synchronous=one, memory=memory)
        for search_by in (exact, exhaustive, hete_mp):
            assert [sum(stage.counts) for stage in search_by(few).stages] == [1, 1]
        with pytest.raises(PlanError, match=r"than microbatches \(1\)") as refused:
            dp(few)
        assert "parallel.strategy.microbatches" in refused.value.remedy


def test_the_largest_sizes_end_a_search() -> None:
    layer = {"forward_s": 2.0, "backward_s": 1.0, "parameter_bytes": 1e18, "saved_bytes": 1e18}
    problem = problem_of([[layer] * 4], limits=[1.0], setting="none")
    for synchronous in (problem.synchronous, None):
        with pytest.raises(PlanError, match="no plan fits the memory"):
            dp(replace(problem, synchronous=synchronous))
