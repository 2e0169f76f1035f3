"""The asynchronous 1F1B schedule against literal tables and hand-made rules."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsepipe.schedule import RankOrder, asynchronous
from tests.support.plans import plan_of

# Zhai et al., Fig. 3: four stages, one device each. Counted from 1, F5 of the first stage
# runs right after the update of minibatch 1, and B5 after those of 2, 3 and 4.
FIGURE_3 = """
F0 F1 F2 F3 B0 U0 F4 B1 U1 F5 B2 U2 B3 U3 B4 U4 B5 U5
F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 F5 B3 U3 B4 U4 B5 U5
F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 F5 B4 U4 B5 U5
F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5
"""

# Fig. 4: three devices, two stages, the first on two of them. Updates count rounds.
FIGURE_4 = """
F0 F2 B0 U0 F4 B2 U1 B4 U2
F1 F3 B1 U0 F5 B3 U1 B5 U2
F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 F5 B5 U5
"""

# A partial last round: replica 1 has no fifth minibatch, yet takes part in its update.
PARTIAL = """
F0 F2 B0 U0 F4 B2 U1 B4 U2
F1 F3 B1 U0 B3 U1 U2
F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4
"""

# A replicated stage behind: each of its replicas updates once in two minibatches.
BEHIND = """
F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3
F0 B0 U0 F2 B2 U1
F1 B1 U0 F3 B3 U1
"""


@pytest.mark.parametrize(
    ("config", "minibatches", "table"),
    [
        ("1-1-1-1", 6, FIGURE_3),
        ("2-1", 6, FIGURE_4),
        ("2-1", 5, PARTIAL),
        ("1-2", 4, BEHIND),
        ("1", 2, "F0 B0 U0 F1 B1 U1\n"),
        ("2", 3, "F0 B0 U0 F2 B2 U1\nF1 B1 U0 U1\n"),
        ("1-1", 0, "\n\n"),
    ],
)
def test_literal_tables(config, minibatches, table):
    assert asynchronous(plan_of(config), minibatches).text().strip() == table.strip()


configs = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda r: "-".join(map(str, r)))


@given(configs, st.lists(st.integers(0, 4), max_size=6), st.data())
def test_however_minibatches_come_the_order_is_the_same(config, counts, data):
    plan = plan_of(config)
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    order = RankOrder(plan, rank)
    told = [action for count in counts for action in order.feed(count)]
    told += order.drain()
    assert tuple(told) == asynchronous(plan, sum(counts)).actions[rank]


@given(configs, st.integers(0, 30))
def test_every_minibatch_runs_once_in_every_stage(config, minibatches):
    plan = plan_of(config)
    schedule = asynchronous(plan, minibatches)
    for stage in range(plan.num_stages):
        ranks = plan.ranks_of(stage)
        for kind in "FB":
            ran = [a.number for r in ranks for a in schedule.actions[r] if a.kind == kind]
            assert sorted(ran) == list(range(minibatches))
        rounds = -(-minibatches // len(ranks))
        for rank in ranks:
            updates = [a.number for a in schedule.actions[rank] if a.kind == "U"]
            assert updates == list(range(rounds))


@given(configs, st.integers(1, 30))
def test_no_more_minibatches_are_in_flight_than_the_warm_up_allows(config, minibatches):
    plan = plan_of(config)
    for rank, actions in enumerate(asynchronous(plan, minibatches).actions):
        in_flight = peak = 0
        for action in actions:
            in_flight += {"F": 1, "B": -1, "U": 0}[action.kind]
            peak = max(peak, in_flight)
        # PipeDream: as many as ranks from here on for each replica, rounded up.
        stage = plan.stage_of(rank)
        behind = sum(plan.replicas(s) for s in range(stage, plan.num_stages))
        assert peak <= -(-behind // plan.replicas(stage))


# By update: in which round of stage 0 its stage's first replica comes to it.
STEPS = {
    ("1-1", 0, 5): [1, 2, 3, 4, 4],
    ("1-1", 1, 5): [0, 1, 2, 3, 4],
    ("1-1-1", 0, 4): [2, 3, 3, 3],
    ("2-1", 0, 5): [1, 2, 2],  # three rounds, the last one of one minibatch
    ("2-1", 2, 5): [0, 0, 1, 1, 2],
    ("1-2", 0, 4): [2, 3, 3, 3],
    ("1-2", 1, 4): [0, 2],  # of replica 1, which comes to them with minibatches 1 and 3
    ("1-2", 2, 4): [0, 2],
    ("2-3", 2, 7): [0, 1, 3],
    ("2-3", 4, 7): [0, 1, 3],  # replica 2 comes to its last one in the drain
}


@pytest.mark.parametrize("given", STEPS)
def test_an_update_belongs_to_the_round_in_which_the_first_replica_comes_to_it(given):
    config, rank, minibatches = given
    plan = plan_of(config)
    readers = plan.replicas(0)
    order = RankOrder(plan, rank)
    steps = []
    for first in range(0, minibatches, readers):
        for action in order.feed(min(readers, minibatches - first)):
            if action.kind == "U":
                steps.append(order.step_of(action.number))
    steps += [order.step_of(action.number) for action in order.drain() if action.kind == "U"]
    assert steps == STEPS[given]


@given(st.sampled_from(["1", "1-1", "2-1", "1-3-1", "2-3", "3-2-1"]), st.integers(1, 25))
def test_an_order_tells_what_its_actions_meet(config, minibatches):
    """Versions and rounds against a count of the actions."""
    plan = plan_of(config)
    for rank in range(plan.num_ranks):
        order, updates = RankOrder(plan, rank), 0
        replicas = plan.replicas(plan.stage_of(rank))
        for action in itertools.chain(order.feed(minibatches), order.drain()):
            assert order.updates == updates
            if action.kind == "U":
                assert order.first_of(action.number) == updates * replicas
                updates += 1
            else:
                assert order.ahead(action.number) == action.number // replicas - updates
