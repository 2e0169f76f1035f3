"""Searches that count what stages recompute end, and within the work that they may do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.activation_checkpointing.stage import cheapest
from sparsepipe.partition.activation_checkpointing.stage_memory import LayerCost, StageCost
from sparsepipe.partition.activation_checkpointing.work import Work
from sparsepipe.partition.costs.model import plan_times
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.search.algorithms import exact, hete_mp, straight
from sparsepipe.partition.search.checkpointed_stages import chosen_of
from sparsepipe.partition.search.reachability import Masks
from sparsepipe.partition.search.stage_costs import PairCosts
from tests.support.recomputing_instances import (
    network_of,
    problem_of,
    random_recomputing,
    seconds_of,
)


class Noted(Work):
    """Notes how many looks were at pairs of places alone."""

    of_pairs = 0.0

    def look_at_pairs(self, pairs: int) -> None:
        before = self.done
        super().look_at_pairs(pairs)
        self.of_pairs += self.done - before


def told_s(problem: Problem, solution: Solution) -> float:
    """Of a plan with the layers that its search has chosen, which fit."""
    plan = solution.stages
    chosen = chosen_of(plan, problem, solution.spans)
    rooms = zip(chosen.peaks_bytes, chosen.rooms_bytes, strict=True)
    assert all(peak <= room * (1 + 1e-8) for peak, room in rooms)
    stages_s, cuts_s = plan_times(plan, problem.spans, problem.fleet, problem.model)
    each = zip(stages_s, chosen.times_s, plan, strict=True)
    return max([s + more / sum(stage.counts) for s, more, stage in each] + cuts_s)


def test_layers_that_a_search_has_chosen_are_the_cheapest_ones() -> None:
    """To the tie, where it had work enough."""
    recomputed = 0
    for seed in range(40):
        problem, _ = random_recomputing(seed, "auto")
        for found in (exact, hete_mp):
            try:
                solution = found(problem)
            except PlanError:
                continue
            assert solution.spans == chosen_of(solution.stages, problem).spans, seed
            recomputed += any(solution.spans or ())
    assert recomputed > 10


def test_layers_are_known_of_a_plan_whatever_work_there_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They fit, and with them the plan takes what it takes with the best ones, or longer."""
    stopped = 0
    for seed in range(12):
        problem, _ = random_recomputing(seed, "auto")
        for most in (300, 1000):
            caplog.clear()
            try:
                solution = exact(problem, work=Work(most))
            except PlanError:
                continue
            best_s = seconds_of(problem, solution.stages)
            assert told_s(problem, solution) >= best_s * (1 - 1e-9), (seed, most)
            stopped += "as much as it may" in caplog.text
    assert stopped > 0


@pytest.mark.parametrize("most", [60_000, 120_000])
def test_looks_at_layers_end_a_search(caplog: pytest.LogCaptureFixture, most: int) -> None:
    """Pairs of places are a small part of it, and no stage is looked at much beyond the end."""
    problem, work = network_of(52), Noted(most)
    solution = straight(problem, work=work)
    assert "as much as it may" in caplog.text
    assert work.of_pairs < 0.3 * most
    assert most <= work.done < 1.1 * most
    assert told_s(problem, solution) < float("inf")


def test_bounds_of_many_layers_end_a_search() -> None:
    """They take a part of the work, which is that of few stages' bounds here."""
    problem, most = network_of(200), 100_000
    work = Work(most)
    with pytest.raises(PlanError, match="as much as it may"):
        straight(problem, work=work)
    assert not work.may_bound
    assert most <= work.done < 1.2 * most


def random_stage(rng: random.Random, length: int) -> StageCost:
    layers = [
        LayerCost(
            forward_s=rng.uniform(1, 9),
            saved_bytes=rng.uniform(1, 9),
            begin_bytes=rng.uniform(0, 5),
            end_bytes=rng.uniform(0, 3),
            output_bytes=rng.uniform(3, 9),
        )
        for _ in range(length)
    ]
    return StageCost(layers=tuple(layers), input_bytes=5.0, in_flight=rng.choice([1, 2, 4]))


@pytest.mark.parametrize("is_any_enough", [False, True])
def test_a_stage_is_looked_at_while_there_is_work(is_any_enough: bool) -> None:
    """What is known by then holds: layers that fit, and a time that none beat."""
    said = Counter[str]()
    for seed in range(6):
        rng = random.Random(seed)
        stage = random_stage(rng, 12)
        limit = rng.uniform(0.4, 0.8) * stage.peak_bytes(())
        best = cheapest(stage, limit_bytes=limit)
        enough_s = best.time_s * 1.02 if is_any_enough and best.spans else None
        for most in (0, 500, 1000, 2000, 4000, 10**9):
            work = Work(most)
            found = cheapest(stage, limit_bytes=limit, enough_s=enough_s, work=work)
            assert work.done < most + 1000, (seed, most)
            assert found.least_s <= best.time_s * (1 + 1e-9), (seed, most)
            if not work.is_done and enough_s is None:
                assert found == best, (seed, most)
            if found.spans is not None:
                assert found.time_s >= best.time_s * (1 - 1e-9), (seed, most)
                assert stage.peak_bytes(found.spans) <= limit * (1 + 1e-8)
            some = "some" if found.spans is not None else "none"
            said[f"{some} of {'few' if work.is_done else 'all'} looks"] += 1
    assert said["none of few looks"] > 0
    assert said["some of all looks"] > 0
    if not is_any_enough:
        assert said["some of few looks"] > 0, said


@pytest.mark.parametrize("setting", ["auto", "all", {"layers": [1]}])
def test_no_plan_is_refused_twice_for_a_time(monkeypatch: pytest.MonkeyPatch, setting: Any) -> None:
    """Though sums of seconds are rounded: links are slow here, and one layer's weights large."""
    refused: set[tuple[Any, ...]] = set()
    keeps_to, questions = PairCosts.keeps_to, 0

    def counted(self: PairCosts, plan: Any, bound_s: float) -> bool:
        nonlocal questions
        questions += 1
        answer = keeps_to(self, plan, bound_s)
        if not answer:
            assert setting == "auto", "where nothing is looked for that might take longer"
            question = self._readers, bound_s, tuple(plan)
            assert question not in refused
            refused.add(question)
        return answer

    monkeypatch.setattr(PairCosts, "keeps_to", counted)
    for seed in range(10):
        rng = random.Random(seed)
        layers = [
            {"forward_s": rng.uniform(1, 2), "backward_s": rng.uniform(1, 2),
             "parameter_bytes": 1e10 if number == 0 else 1.0,
             "saved_bytes": 1e10 * rng.uniform(0.1, 0.9)}
            for number in range(6)
        ]  # fmt: skip
        problem = problem_of([layers], limits=[6e10], setting=setting)
        many = replace(problem.fleet.kinds[0], count=4)
        problem = replace(problem, fleet=replace(problem.fleet, kinds=(many,)))
        assert any(sum(stage.counts) > 1 for stage in exact(problem).stages)
    assert questions > 50
    assert bool(refused) == (setting == "auto")


@pytest.mark.parametrize("setting", ["auto", "all"])
def test_times_below_all_that_are_told_apart_end_a_search(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    asked, reached = [0], Masks.reached

    def counted(self: Masks, bound_s: float) -> Any:
        asked[0] += 1
        assert asked[0] < 100, "it asks for ever"
        return reached(self, bound_s)

    monkeypatch.setattr(Masks, "reached", counted)
    layers = [{"forward_s": 1e-310, "backward_s": 1e-310}] * 3
    for limits in ([], [99.0]):
        asked[0] = 0
        assert exact(problem_of([layers], limits=limits, setting=setting)).stages
