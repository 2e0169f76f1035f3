"""The bookkeeping of versions against a replay that keeps real sets of weights."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepipe.schedule import (
    RankOrder,
    Tally,
    asynchronous,
    included_at,
    passages,
    peaks,
    until_return,
)
from tests.support.plans import plan_of

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
        assert peaks(schedule, rank).stashed == peak
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
def test_a_prediction_for_each_minibatch_in_flight(config, minibatches):
    schedule = asynchronous(plan_of(config), minibatches)
    for rank, actions in enumerate(schedule.actions):
        in_flight, most = set(), 0
        for action in actions:
            if action.kind != "U":
                in_flight ^= {action.number}
            most = max(most, len(in_flight))
        assert peaks(schedule, rank).predicted == 1 + most


@given(small, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_counting_goes_on_as_minibatches_come(config, rounds):
    plan = plan_of(config)
    schedule = asynchronous(plan, sum(rounds))
    for rank in range(plan.num_ranks):
        order, tally = RankOrder(plan, rank), Tally(plan, rank)
        for count in rounds:
            for action in order.feed(count):
                tally.see(action)
        tally.drain()
        for action in order.drain():
            tally.see(action)
        assert tally.stashed == replay(schedule, rank)[1]
        assert tally.vertical == peaks(schedule, rank).vertical
        assert tally.predicted == peaks(schedule, rank).predicted


@given(small, st.integers(1, 25))
def test_vertical_sync_finds_its_version_and_keeps_no_more_than_counted(config, minibatches):
    """Every stage keeps sets of minibatches, and needs the one that equals stage 0's."""
    plan = plan_of(config)
    schedule = asynchronous(plan, minibatches)
    longer = asynchronous(plan, minibatches + 4)  # for what the next would ask, did it come
    first = {}
    for rank in plan.ranks_of(0):
        first |= {m: seen for m, (seen, _) in replay(longer, rank)[0].items()}
    assert {m: len(seen) for m, seen in first.items()} == {m: included_at(plan, m) for m in first}
    for rank in range(plan.num_ranks):
        replicas = plan.replicas(plan.stage_of(rank))
        # Of a round, all or nothing can be in a stage's weights.
        usable = {m: frozenset(range(len(first[m]) // replicas * replicas)) for m in first}
        kept, newest, in_flight, peak = [frozenset()], frozenset(), set(), 1
        needed = frozenset()
        order = RankOrder(plan, rank)
        for action in (*order.feed(minibatches), "drain", *order.drain()):
            if action == "drain":
                needed = None
            elif action.kind == "F":
                assert usable[action.number] in kept
                in_flight.add(action.number)
                needed = usable[order.following(action.number)]
            elif action.kind == "B":
                in_flight.remove(action.number)
            else:
                start = action.number * replicas
                newest = newest | frozenset(range(start, start + replicas))
                kept.append(newest)
            used = {usable[m] for m in in_flight}
            later = needed is not None
            kept = [v for v in kept if v == newest or v in used or (later and v >= needed)]
            peak = max(peak, len(kept))
        assert peaks(schedule, rank).vertical == peak


@pytest.mark.parametrize(
    ("config", "stashed", "vertical", "predicted"),
    [
        ("1-1-1-1", [4, 3, 2, 1], [4, 4, 4, 4], [5, 4, 3, 2]),
        ("2-1", [2, 2, 1], [2, 2, 4], [3, 3, 2]),
        ("1-1", [2, 1], [2, 2], [3, 2]),
        ("1-3-1", [5, 2, 2, 2, 1], [5, 3, 2, 2, 5], [6, 3, 3, 3, 2]),
        ("1", [1], [1], [2]),
    ],
)
def test_peaks_counted_by_hand(config, stashed, vertical, predicted):
    schedule = asynchronous(plan_of(config), 20)
    ranks = range(schedule.plan.num_ranks)
    assert [peaks(schedule, rank).stashed for rank in ranks] == stashed
    assert [peaks(schedule, rank).vertical for rank in ranks] == vertical
    assert [peaks(schedule, rank).predicted for rank in ranks] == predicted


@pytest.mark.parametrize("stages", range(1, 9))
def test_the_updates_until_a_minibatch_is_back_are_those_of_a_clock(stages):
    """Forwards and backwards of one tick, a new minibatch every second one, in steady state.

    Stage k runs the forward of minibatch m at tick 2 m + k, its backward at 2 m + 2 N - 1 - k,
    and updates at once. At the end of the way every stage's own update counts for none, as
    stage 0's, which is just being made, does.
    """
    back = 2 * stages  # the tick after minibatch 0's last backward
    for k in range(stages):
        own = 2 * stages - 1 - k
        done = sum(own + 2 * j + 1 <= back for j in range(1, stages + 1))
        assert until_return(plan_of("-".join("1" * stages)), k) == done == k // 2
        between = sum(k < own - 2 * j < own for j in range(1, stages + 1))
        assert between == stages - k - 1


def test_the_updates_until_a_minibatch_is_back_count_rounds():
    for config, expected in [("2-1", [0, 1]), ("1-3-1", [0, 0, 2]), ("4-2-1", [0, 1, 3])]:
        plan = plan_of(config)
        assert [until_return(plan, s) for s in range(plan.num_stages)] == expected
