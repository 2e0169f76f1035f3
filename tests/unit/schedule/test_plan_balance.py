"""Balanced cuts against every possible choice."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepipe.errors import PlanError
from sparsepipe.schedule import balanced


def dearest(costs, replicas, cuts):
    bounds = [0, *cuts, len(costs)]
    spans = zip(bounds, bounds[1:], replicas, strict=False)
    return max(sum(costs[a:b]) / r for a, b, r in spans)


def spread(costs, replicas, cuts):
    bounds = [0, *cuts, len(costs)]
    spans = zip(bounds, bounds[1:], replicas, strict=False)
    return sum(sum(costs[a:b]) ** 2 / r for a, b, r in spans)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_no_choice_of_cuts_is_better(costs, replicas):
    if len(replicas) > len(costs):
        with pytest.raises(PlanError):
            balanced(costs, replicas)
        return
    cuts = balanced(costs, replicas)
    assert len(cuts) == len(replicas) - 1
    assert cuts == sorted(set(cuts))
    every = [list(c) for c in combinations(range(1, len(costs)), len(replicas) - 1)]
    best = min(dearest(costs, replicas, choice) for choice in every)
    assert dearest(costs, replicas, cuts) == pytest.approx(best)
    good = [c for c in every if dearest(costs, replicas, c) == pytest.approx(best)]
    evenest = min(spread(costs, replicas, choice) for choice in good)
    assert spread(costs, replicas, cuts) == pytest.approx(evenest)


def test_layers_without_cost_stay_behind_the_layer_they_follow():
    assert balanced([5, 0, 0, 5, 0], [1, 1]) == [3]


def test_a_layer_that_outweighs_all_leaves_the_others_even():
    assert balanced([1, 1, 1, 1, 10], [1, 1, 1]) == [2, 4]


def test_replicas_take_their_share():
    assert balanced([1] * 6, [2, 1]) == [4]
