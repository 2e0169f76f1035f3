"""Branching graphs are split between states that include one another, as brute force does it."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from sparsepipe.partition.cost import cost_model
from sparsepipe.partition.evaluate import plan_times
from sparsepipe.partition.fleet import Fleet, Kind
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.searches import hete_mp
from sparsepipe.partition.spans import state_spans
from sparsepipe.partition.ties import Choice
from sparsepipe.profiling import State, antichain_states, parse_graph

DEVICES = 3


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
    fleet = Fleet(
        kinds=(Kind(name="fast", host="h", count=2), Kind(name="slow", host="h", count=1)),
        inside={"h": 4000.0},
        between=4000.0,
    )
    model = cost_model(["eq4", "pipedream", "sparsepipe_hete"][seed % 3])
    problem = Problem(fleet=fleet, spans=state_spans(states), model=model)
    found = bottleneck(problem, list(hete_mp(problem).stages))
    assert found == pytest.approx(min(bottleneck(problem, p) for p in all_plans(states[0])))


def bottleneck(problem: Problem, plan: list[Choice]) -> float:
    stages, cuts = plan_times(plan, problem.spans, problem.fleet, problem.model)
    return max(stages + cuts)


def all_plans(states: list[State]) -> list[list[Choice]]:
    """Every chain of nested states that ends with all layers, over slices of the device list."""
    slices = [[(2, 1)], [(1, 0), (1, 1)], [(2, 0), (0, 1)], [(1, 0), (1, 0), (0, 1)]]
    found = []
    for groups in slices:
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
