"""The bookkeeping of versions against a replay that keeps real sets of weights."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import plan_of

from sparsepipe.schedule import (
    asynchronous,
    included,
    passages,
    peak_stashed,
    peak_vertical,
)

small = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda r: "-".join(map(str, r)))


@dataclass
class Rank:
    """Weights as the set of minibatches that they include, one object for each version."""

    newest: frozenset[int] = frozenset()
    stashed: dict[int, frozenset[int]] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    peak: int = 1


def replay(schedule, rank):
    """Runs a rank's actions on sets; the weights of each F and B, and the most sets alive."""
    plan, state, seen = schedule.plan, Rank(), {}
    replicas = plan.replicas(plan.stage_of(rank))
    for action in schedule.actions[rank]:
        if action.kind == "F":
            state.stashed[action.number] = state.newest
        elif action.kind == "B":
            seen[action.number] = (state.stashed.pop(action.number), state.newest)
        else:
            first = action.number * replicas
            state.newest = state.newest | frozenset(range(first, first + replicas))
        state.peak = max(state.peak, len({state.newest, *state.stashed.values()}))
    return seen, state.peak


@given(small, st.integers(1, 25))
def test_versions_are_those_of_a_replay(config, minibatches):
    schedule = asynchronous(plan_of(config), minibatches)
    for rank in range(schedule.plan.num_ranks):
        replicas = schedule.plan.replicas(schedule.plan.stage_of(rank))
        seen, peak = replay(schedule, rank)
        found = passages(schedule, rank)
        assert found.keys() == seen.keys()
        for minibatch, (forward, backward) in seen.items():
            assert found[minibatch].forward * replicas == len(forward)
            assert found[minibatch].backward * replicas == len(backward)
            # Between its forward and its own update come those in between, no more.
            assert found[minibatch].staleness == (minibatch - len(forward)) // replicas
        assert peak_stashed(schedule, rank) == peak
        assert peak <= 1 + schedule.plan.warmup(schedule.plan.stage_of(rank))


@given(small, st.integers(1, 25))
def test_staleness_is_the_warm_up_once_that_is_over(config, minibatches):
    schedule = asynchronous(plan_of(config), minibatches)
    for rank in range(schedule.plan.num_ranks):
        stage = schedule.plan.stage_of(rank)
        warmup = schedule.plan.warmup(stage)
        for place, passage in enumerate(passages(schedule, rank).values()):
            assert passage.staleness == min(place, warmup)


@given(small, st.integers(1, 25))
def test_vertical_sync_always_finds_its_version_and_keeps_no_more_than_said(config, minibatches):
    """Every stage keeps sets of minibatches; what it wants is what stage 0's set says."""
    schedule = asynchronous(plan_of(config), minibatches)
    plan = schedule.plan
    first = {}
    for rank in plan.ranks_of(0):
        first |= {m: seen for m, (seen, _) in replay(schedule, rank)[0].items()}
    assert {m: len(seen) for m, seen in first.items()} == included(schedule)
    for rank in range(plan.num_ranks):
        replicas = plan.replicas(plan.stage_of(rank))
        # Of a round, all or nothing can be in a stage's weights.
        usable = {m: frozenset(range(len(first[m]) // replicas * replicas)) for m in first}
        own = [a.number for a in schedule.actions[rank] if a.kind == "F"]
        kept, newest, in_flight, peak = [frozenset()], frozenset(), set(), 1
        for action in schedule.actions[rank]:
            if action.kind == "F":
                assert usable[action.number] in kept
                in_flight.add(own.pop(0))
            elif action.kind == "B":
                in_flight.remove(action.number)
            else:
                start = action.number * replicas
                newest = newest | frozenset(range(start, start + replicas))
                kept.append(newest)
            used = {usable[m] for m in in_flight}
            kept = [v for v in kept if v == newest or v in used or (own and v >= usable[own[0]])]
            peak = max(peak, len(kept))
        assert peak_vertical(schedule, rank) == peak


@pytest.mark.parametrize(
    ("config", "stashed", "vertical"),
    [
        ("1-1-1-1", [4, 3, 2, 1], [4, 4, 4, 4]),
        ("2-1", [2, 2, 1], [2, 2, 4]),
        ("1", [1], [1]),
    ],
)
def test_peaks_counted_by_hand(config, stashed, vertical):
    schedule = asynchronous(plan_of(config), 20)
    ranks = range(schedule.plan.num_ranks)
    assert [peak_stashed(schedule, rank) for rank in ranks] == stashed
    assert [peak_vertical(schedule, rank) for rank in ranks] == vertical


def test_what_stage_0_includes_is_what_later_stages_may_use():
    schedule = asynchronous(plan_of("1-1-1"), 6)
    assert included(schedule) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert included(asynchronous(plan_of("2-1"), 6)) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 2, 5: 2}
