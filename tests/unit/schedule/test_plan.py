"""Plans: what they say of ranks, and what is refused."""

import json

import pytest

from sparsepipe.errors import PlanError, ScheduleError
from sparsepipe.schedule import Action, Plan, Schedule, Stage


def test_ranks_are_numbered_stage_after_stage():
    plan = Plan.of(config="1-3-2", cuts=[4, 7], num_layers=10)
    assert [plan.stage_of(rank) for rank in range(6)] == [0, 1, 1, 1, 2, 2]
    assert [plan.replica_of(rank) for rank in range(6)] == [0, 0, 1, 2, 0, 1]
    assert [stage.layers for stage in plan.stages] == [(0, 3), (4, 6), (7, 9)]
    assert (plan.config, plan.cuts, plan.num_layers, plan.num_ranks) == ("1-3-2", (4, 7), 10, 6)
    assert [plan.rank_for(1, m) for m in range(4)] == [1, 2, 3, 1]
    assert [plan.warmup(s) for s in range(3)] == [5, 1, 0]


def test_replicas_take_turns_at_microbatches():
    plan = Plan.of(config="1-3-2", cuts=[4, 7], num_layers=10)
    own = [list(plan.microbatches_of(rank, 7)) for rank in range(6)]
    assert own == [[0, 1, 2, 3, 4, 5, 6], [0, 3, 6], [1, 4], [2, 5], [0, 2, 4, 6], [1, 3, 5]]
    assert list(plan.microbatches_of(3, 2)) == []


@pytest.mark.parametrize(
    ("config", "pairs"),
    [
        ("2-4", [(0, 2), (0, 4), (1, 3), (1, 5)]),
        ("2-3", [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]),
        ("2-2", [(0, 2), (1, 3)]),
    ],
)
def test_peers_are_ranks_that_share_a_minibatch(config, pairs):
    assert list(Plan.of(config=config, cuts=[1], num_layers=2).peers(0, 1)) == pairs


def test_a_plan_file_is_read_back():
    plan = Plan(
        stages=(
            Stage(layers=(0, 23), devices=("a", "b")),
            Stage(layers=(24, 51), devices=("c",)),
        ),
        details={"bottleneck_s": 0.25, "strategy": "hete_mp"},
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).details == plan.details
    assert json.loads(plan.to_json())["config"] == "2-1"


@pytest.mark.parametrize(
    ("config", "cuts", "words"),
    [
        ("2-1", [], "does not fit the number of stages"),
        ("2-x", [1], "replicas"),
        ("0-1", [1], "replicas"),
        ("1-1", [4], "do not split 4 layers"),
        ("1-1", [0], "do not split"),
        ("1-1-1", [3, 2], "do not split"),
    ],
)
def test_plans_that_do_not_fit_are_refused(config, cuts, words):
    with pytest.raises(PlanError, match=words):
        Plan.of(config=config, cuts=cuts, num_layers=4)


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [{"layers": [1, 3], "devices": ["a"]}],
        [{"layers": [0, 3], "devices": ["a"]}, {"layers": [3, 4], "devices": ["a"]}],
        [{"layers": [0, 3], "devices": []}],
        [{"layers": [0], "devices": ["a"]}],
    ],
)
def test_broken_plan_files_are_refused(stages):
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps({"stages": stages}))


def test_a_plan_file_that_contradicts_itself_is_refused():
    text = json.dumps({"config": "2-1", "stages": [{"layers": [0, 3], "devices": ["a"]}]})
    with pytest.raises(PlanError, match="2-1"):
        Plan.from_json(text)


def test_actions_are_read_and_written():
    for text in ("F3", "B0", "U12", "F3.2"):
        assert str(Action.parse(text)) == text
    for text in ("X1", "F", "F1.", "U3.2", "F1 ", "F-1"):
        with pytest.raises(ScheduleError, match="is not a valid action"):
            Action.parse(text)
    with pytest.raises(ScheduleError, match="2 ranks"):
        Schedule.parse(Plan.of(config="1-1", cuts=[1], num_layers=2), "F0 B0")
