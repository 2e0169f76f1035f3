"""Branching graphs are split between states that include one another, as brute force does it."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import state_spans
from sparsepipe.partition.costs.model import cost_model, plan_times
from sparsepipe.partition.devices import Choice, Counts, DeviceKind, DevicePool
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search import algorithms as size
from sparsepipe.partition.search.algorithms import exact, exhaustive, hete_mp
from sparsepipe.partition.search.baselines import mp_by_levels
from sparsepipe.partition.search.exhaustive import divisions
from sparsepipe.profiling import State, antichain_states, parse_graph
from tests.support.instances import on_one_host


def random_states(rng: random.Random, slower: float) -> list[State]:
    size = rng.randint(3, 7)
    rows, edges = "", ""
    for n in range(size):
        figures = [slower * rng.randint(1, 9), rng.randint(0, 9), rng.randint(0, 9)]
        rows += (
            f"n{n} -- Layer() -- forward_compute_time={figures[0]}, backward_compute_time=0.0, "
            f"activation_size={figures[1]}.0, parameter_size={figures[2]}.0\n"
        )
        for before in rng.sample(range(n), min(n, rng.randint(1, 2))):
            edges += f"\tn{before} -- n{n}\n"
    return antichain_states(parse_graph(rows + edges))


@pytest.mark.parametrize("seed", range(40))
def test_the_best_bottleneck_is_that_of_all_nested_splits(seed: int) -> None:
    # The same graph on two kinds of devices, one of them slower.
    states = [random_states(random.Random(seed), slower) for slower in (1.0, 1.5)]
    model = ["eq4", "pipedream", "sparsepipe_hete"][seed % 3]
    spans = state_spans(states)
    problem = on_one_host(spans, {"fast": 2, "slow": 1}, model=model, speed=4000.0)
    every = [list(division) for division in divisions(problem.pool.counts)]
    for search, groups in ((hete_mp, SLICES), (exact, every)):
        found = bottleneck(problem, list(search(problem).stages))
        least_s = min(bottleneck(problem, plan) for plan in all_plans(states[0], groups))
        assert found == pytest.approx(least_s)


def test_limits_of_memory_and_a_second_host() -> None:
    without = some = 0
    for seed in range(25):
        problem, states = limited_problem(seed)
        every = [list(division) for division in divisions(problem.pool.counts)]
        for search, groups in ((hete_mp, SLICES), (exact, every)):
            plans = all_plans(states, groups)
            fitting = [plan for plan in plans if has_room(problem, plan)]
            without += not fitting
            some += 0 < len(fitting) < len(plans)
            if fitting:
                least_s = min(bottleneck(problem, plan) for plan in fitting)
                found = list(search(problem).stages)
                assert has_room(problem, found), seed
                assert bottleneck(problem, found) == pytest.approx(least_s), seed
            else:
                with pytest.raises(PlanError, match="no plan fits"):
                    search(problem)
    assert without > 3
    assert some > 12


def limited_problem(seed: int) -> tuple[Problem, list[State]]:
    """Two fast devices on a host, a slow one on another, mostly with limits of memory."""
    rng = random.Random(f"hosts {seed}")
    states = [random_states(random.Random(seed), slower) for slower in (1.0, 1.5)]
    limits = [rng.uniform(10, 120) if rng.random() < 0.8 else None for _ in range(2)]
    pool = DevicePool(
        kinds=(
            DeviceKind(name="fast", host="a", count=2, memory_bytes=limits[0]),
            DeviceKind(name="slow", host="b", count=1, memory_bytes=limits[1]),
        ),
        inside={"a": 8000.0, "b": float("inf")},
        between=rng.choice([500.0, 2000.0]),
    )
    problem = Problem(
        pool=pool,
        spans=state_spans(states),
        model=cost_model(["eq4", "pipedream", "sparsepipe_hete"][seed % 3]),
        memory=MemoryModel(stash=bool(seed % 2), optimizer=rng.choice([0.0, 1.0])),
    )
    return problem, states[0]


def has_room(problem: Problem, plan: list[Choice]) -> bool:
    """Each device of each stage, from the stage's layers one by one."""
    memory = problem.memory
    assert memory is not None
    for number, stage in enumerate(plan):
        replicas = sum(stage.counts)
        left = sum(sum(later.counts) for later in plan[number:])
        in_flight = (left - 1) // replicas + 1
        sets = (in_flight if memory.stash else 1) + memory.gradients + memory.optimizer
        sets += 2 if replicas > 1 else 0
        parameters, stored = (
            sums[stage.end] - sums[stage.first]
            for sums in (problem.spans.parameter_bytes_I, problem.spans.stored_bytes_I)
        )
        kept = sets * parameters + in_flight * stored
        for kind, count in zip(problem.pool.kinds, stage.counts, strict=True):
            if count and kind.memory_bytes is not None and kept > kind.memory_bytes:
                return False
    return True


@pytest.mark.parametrize("seed", range(10))
def test_levels_of_one_host_are_no_levels(seed: int) -> None:
    spans = state_spans([random_states(random.Random(seed), 1.0)])
    problem = on_one_host(spans, {"A": 3}, model="pipedream", speed=4000.0)
    by_levels = bottleneck(problem, list(mp_by_levels(problem, device="A").stages))
    assert by_levels == pytest.approx(bottleneck(problem, list(hete_mp(problem).stages)))


def test_trying_all_plans_is_for_chains() -> None:
    spans = state_spans([random_states(random.Random(0), 1.0)])
    with pytest.raises(PlanError, match="branches") as caught:
        exhaustive(on_one_host(spans, {"A": 2}))
    assert "exact" in caught.value.remedy


def test_too_many_pairs_of_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = state_spans([random_states(random.Random(0), 1.0)])
    monkeypatch.setattr(size, "MOST_WINDOWS", 36 * spans.num_layers**2 - 1)
    with pytest.raises(PlanError, match="36 stages") as caught:
        hete_mp(on_one_host(spans, {"A": 8}))
    assert "layers of a block as one" in caught.value.remedy


def bottleneck(problem: Problem, plan: list[Choice]) -> float:
    stages, cuts = plan_times(plan, problem.spans, problem.pool, problem.model)
    return max(stages + cuts)


SLICES = [[(2, 1)], [(1, 0), (1, 1)], [(2, 0), (0, 1)], [(1, 0), (1, 0), (0, 1)]]
"""Of the list of two fast devices and a slow one."""


def all_plans(states: list[State], divisions: list[list[Counts]]) -> list[list[Choice]]:
    """Every chain of nested states that ends with all layers, on given devices."""
    found = []
    for groups in divisions:
        for middle in combinations(range(1, len(states)), len(groups) - 1):
            places = [0, *middle, len(states)]
            nested = all(states[a - 1].within(states[b - 1]) for a, b in pairwise(places[1:]))
            if nested:
                found.append(
                    [
                        Choice(first=places[s], end=places[s + 1], counts=counts)
                        for s, counts in enumerate(groups)
                    ]
                )
    return found
