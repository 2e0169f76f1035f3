"""Searches for plans of synchronous pipelines that recompute nothing, beside trying all plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import chain_spans
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.memory import MemoryModel, Microbatches
from sparsepipe.partition.problem import Problem, Solution, SynchronousStages
from sparsepipe.partition.search.algorithms import (
    check_states,
    dp,
    exact,
    hete_mp,
    mp,
    straight,
    variance,
)
from sparsepipe.partition.search.checkpointed_stages import recomputation_of
from sparsepipe.partition.search.reachability import PairReachability
from tests.support.recomputing_instances import least_s, problem_of, random_recomputing, seconds_of


def falls(problem: Problem) -> bool:
    """Whether some stage keeps less than one with the same begin that ends sooner."""
    _, end_I = problem.spans.stored_between()
    return bool((end_I[1:] < end_I[:-1]).any())


def in_parts(problem: Problem, schedule: str, count: int, *, setting: Any = "none") -> Problem:
    cut = Microbatches(schedule=schedule, count=count, batch_size=None)
    return replace(problem, synchronous=SynchronousStages(setting=setting, microbatches=cut))


def on(devices: int, layers: int, *, limit: float | None, **costs: float) -> Problem:
    """Layers that are all alike on devices that are, too, each saving a byte for a batch."""
    each = {"forward_s": 1.0, "backward_s": 2.0, "saved_bytes": 1.0, **costs}
    limits = [] if limit is None else [limit]
    problem = problem_of([[each] * layers], limits=limits, setting="none")
    kinds = (replace(problem.pool.kinds[0], count=devices),)
    return replace(problem, pool=replace(problem.pool, kinds=kinds))


def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PairReachability, bound_s: float) -> Any:
        raise AssertionError("pairs of a begin and an end were looked at")

    monkeypatch.setattr(PairReachability, "reached", refuse)


def time_s(found: Any, problem: Problem, **options: Any) -> float:
    try:
        return seconds_of(problem, found(problem, **options).stages)
    except PlanError:
        return float("inf")


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, 1000), marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_ends_are_found_without_looking_at_pairs(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """Also behind outputs that no layer saves, and so that the plans are those of trying all."""
    no_masks(monkeypatch)
    outcomes = Counter[tuple[bool, bool]]()
    for seed in seeds:
        problem, order = random_recomputing(seed, "none")
        kinds = problem.pool.kinds
        names = [f"{kinds[kind].host}/{kinds[kind].name}" for kind in order]
        best_s = least_s(problem)
        assert time_s(exact, problem) == pytest.approx(best_s), seed
        assert time_s(hete_mp, problem, order=names) == pytest.approx(least_s(problem, order)), seed
        outcomes[best_s < float("inf"), falls(problem)] += 1
    assert len(outcomes) == 4, outcomes


@pytest.mark.parametrize("borders", [({"end_bytes": 7.0}, {}), ({}, {"begin_bytes": 8.0})])
@pytest.mark.parametrize("is_synchronous", [False, True])
def test_a_part_of_a_stage_may_keep_more(
    monkeypatch: pytest.MonkeyPatch, is_synchronous: bool, borders: Any
) -> None:
    """A stage keeps 3 bytes, though one with its first or its last layer alone would keep 9."""
    no_masks(monkeypatch)
    each = {"forward_s": 1.0, "backward_s": 2.0}
    layers = [
        {**each, "saved_bytes": 2.0, **borders[0]},
        {**each, "saved_bytes": 1.0, **borders[1]},
    ]
    for limit, fits in ((3.0, True), (2.9, False)):
        problem = problem_of([layers], limits=[limit], setting="none")
        if not is_synchronous:
            problem = replace(problem, synchronous=None)
        for found in (hete_mp, exact):
            if fits:
                assert found(problem).config == "2"
                continue
            with pytest.raises(PlanError, match="no plan fits the memory"):
                found(problem)


@pytest.mark.parametrize("setting", ["none", {}, "auto"])
def test_a_batch_in_parts_is_no_more_than_a_batch(setting: Any) -> None:
    """A stage of gpipe keeps what its layers save for all parts, 1 byte each; so first stages do.

    Counted as in an asynchronous pipeline the first of four would keep four batches. Sums make
    stages of several devices a little slower.
    """
    few = on(4, 4, limit=1.6, parameter_bytes=0.01)
    problem = in_parts(few, "gpipe", 4, setting=setting)
    for found in (straight, hete_mp, exact):
        assert found(problem).config == "1-1-1-1"
    assert all(found(problem, device="A").config == "1-1-1-1" for found in (mp, variance))
    solution = straight(problem)
    chosen = recomputation_of(solution.stages, problem, solution.spans)
    assert not any(chosen.spans)
    told = explain(problem, solution, chosen)
    assert [row.memory_bytes for row in told.rows] == pytest.approx([1.03] * 4)
    with pytest.raises(PlanError, match="no plan fits the memory"):
        straight(replace(problem, synchronous=None))


def test_what_later_stages_keep_of_several_readers_counts() -> None:
    """Of three batches that three devices read the fourth would have all parts: 3 bytes."""
    layers = [
        {"forward_s": 3.0, "backward_s": 6.0, "saved_bytes": 0.0},
        {"forward_s": 1.0, "backward_s": 2.0, "saved_bytes": 1.0, "parameter_bytes": 0.01},
    ]
    problem = problem_of([layers], limits=[2.0], setting="none")
    four = (replace(problem.pool.kinds[0], count=4),)
    problem = in_parts(replace(problem, pool=replace(problem.pool, kinds=four)), "gpipe", 6)
    solution = exact(problem)
    assert solution.config != "3-1"
    assert seconds_of(problem, solution.stages) == pytest.approx(least_s(problem))
    asynchronous = exact(replace(problem, synchronous=None))
    assert asynchronous.config == "3-1"
    assert seconds_of(problem, asynchronous.stages) == float("inf"), "which would not fit"


@pytest.mark.parametrize("found", [dp, hete_mp])
def test_the_verdict_on_one_stage_that_fits_in_microbatches_only(found: Any) -> None:
    """Each of two devices keeps half of its batch, 1 byte, on links too slow to split the model."""

    def solved(limit: float) -> tuple[Problem, Solution]:
        problem = in_parts(on(2, 2, limit=limit, activation_bytes=0.01), "1f1b", 4)
        slow = replace(problem.pool, inside={"h": 1e-4}, between=1e-4)
        problem = replace(problem, pool=slow)
        return problem, found(problem)

    problem, solution = solved(1.8)
    assert solution.config == "2"
    told = explain(problem, solution, recomputation_of(solution.stages, problem))
    assert told.rows[0].memory_bytes == pytest.approx(1.0, abs=0.1)
    assert told.dp_s is None
    expected = "one stage on all devices, in microbatches: whole batches would not fit"
    assert told.verdict() == expected
    problem, solution = solved(2.2)
    told = explain(problem, solution, recomputation_of(solution.stages, problem))
    assert told.dp_s == pytest.approx(3.0)
    assert "data parallelism" in told.verdict()


@pytest.mark.parametrize("found", [hete_mp, straight, exact])
def test_without_limits_the_plan_is_that_of_the_times(found: Any) -> None:
    for seed in range(20):
        problem, _ = random_recomputing(seed, "none")
        if found is straight and problem.pool.num_devices > problem.spans.num_layers:
            continue
        free = tuple(replace(kind, memory_bytes=None) for kind in problem.pool.kinds)
        problem = replace(problem, pool=replace(problem.pool, kinds=free))
        problem = in_parts(problem, "1f1b", problem.pool.num_devices)
        assert found(problem) == found(replace(problem, synchronous=None, memory=None)), seed


@pytest.mark.parametrize("limit", [None, 6.0])
def test_many_devices_are_looked_at_by_windows(
    monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> None:
    """And however many there are, a chain that recomputes nothing is never refused."""
    no_masks(monkeypatch)
    few = on(60, 80, limit=limit)
    heavy = replace(few.profiles[0].layers[1], begin_bytes=5.0)  # a begin before it keeps less
    layers = (few.profiles[0].layers[0], heavy, *few.profiles[0].layers[2:])
    profiles = (replace(few.profiles[0], layers=layers),)
    few = replace(few, profiles=profiles, spans=chain_spans(profiles))
    problem = in_parts(few, "1f1b", 4)
    check_states(problem, 10**6)
    stages = hete_mp(problem).stages
    assert max(sum(stage.counts) for stage in stages) <= 4
    counting = replace(problem, memory=MemoryModel(stash=False))
    assert seconds_of(counting, stages) == pytest.approx(4.0)
