"""When actions run, against times read off the paper's figures and one rule at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Schedule, asynchronous, gpipe, naive
from tests.support.plans import plan_of
from tests.support.timelines import timeline


def starts(schedule, rank, **times):
    spans = timeline(schedule, **times)
    return {str(s.action): s.start for s in spans if s.rank == rank}


def test_zhai_figure_1_one_stage_works_at_a_time():
    schedule = naive(plan_of("1-1-1-1"), 2)
    assert [starts(schedule, rank)["F0"] for rank in range(4)] == [0, 1, 2, 3]
    assert [starts(schedule, rank)["B0"] for rank in range(4)] == [10, 8, 6, 4]
    assert starts(schedule, 0)["F1"] == 12  # four forwards and four backwards of 2 later


def test_zhai_figure_2_microbatches_fill_and_drain():
    schedule = gpipe(plan_of("1-1-1-1"), 2, microbatches=4)
    first, last = starts(schedule, 0), starts(schedule, 3)
    assert [last[f"F0.{t}"] for t in range(4)] == [3, 4, 5, 6]
    assert [last[f"B0.{t}"] for t in (3, 2, 1, 0)] == [7, 9, 11, 13]
    assert [first[f"B0.{t}"] for t in (3, 2, 1, 0)] == [13, 15, 17, 19]
    assert (first["U0"], first["F1.0"]) == (21, 21)
    assert (last["U0"], last["F1.0"]) == (15, 24)  # its bubble


def test_zhai_figure_3_no_stage_waits_once_the_pipeline_is_full():
    schedule = asynchronous(plan_of("1-1-1-1"), 40)
    first = starts(schedule, 0)
    # Counted from 1: F5 right after the update of minibatch 1, B5 after those of 2, 3 and 4.
    assert (first["U0"], first["F4"]) == (12, 12)
    assert first["F4"] < first["U1"] < first["U2"] < first["U3"] < first["B4"]
    for rank in range(4):
        times = starts(schedule, rank)
        assert [times[f"B{m}"] - times[f"B{m - 1}"] for m in range(4, 36)] == [3] * 32


def test_zhai_figure_4_two_replicas_keep_pace_with_a_stage_twice_as_fast():
    schedule = asynchronous(plan_of("2-1"), 20)
    replica, behind = starts(schedule, 0, stages=[2, 1]), starts(schedule, 2, stages=[2, 1])
    assert [replica[a] for a in ("F0", "F2", "B0", "U0", "F4", "B2")] == [0, 2, 5, 12, 12, 14]
    assert [behind[f"F{m}"] for m in range(4)] == [2, 5, 8, 11]
    # Full: six times the unit for two minibatches, in which a replica works all the time.
    assert [replica[f"F{m}"] for m in range(4, 18, 2)] == [12 + 6 * k for k in range(7)]
    assert [behind[f"F{m}"] for m in range(4, 18)] == [14 + 3 * k for k in range(14)]


def test_schedules_that_cannot_run_are_refused():
    plan = plan_of("1-1")
    with pytest.raises(ScheduleError, match="deadlock"):
        timeline(Schedule.parse(plan, "F0 B0 U0 F1 B1 U1\nF0 F1 B0 U0 B1 U1"))


configs = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda r: "-".join(map(str, r)))
times = st.integers(1, 5)


@settings(deadline=None)
@given(configs, st.integers(1, 12), st.lists(times, min_size=4, max_size=4), times, times)
def test_every_start_is_the_end_of_what_was_waited_for(config, minibatches, stages, back, update):
    """No action begins early, and none waits without a reason."""
    plan = plan_of(config)
    schedule = asynchronous(plan, minibatches)
    spans = timeline(schedule, backward=back, update=update, stages=stages)
    lasts = {"F": 1.0, "B": back, "U": update}
    by_rank = [[s for s in spans if s.rank == rank] for rank in range(plan.num_ranks)]
    assert tuple(tuple(s.action for s in own) for own in by_rank) == schedule.actions
    free = {}  # when a rank has done what comes before an action
    ends = {}  # when a stage is through with it
    for own in by_rank:
        for before, span in zip([None, *own], own, strict=False):
            free[span.rank, span.action] = before.end if before else 0
            ends[plan.stage_of(span.rank), span.action] = span.end
    for span in spans:
        stage, action = plan.stage_of(span.rank), span.action
        if action.kind == "U":
            wanted = max(free[rank, action] for rank in plan.ranks_of(stage))
        else:
            source = stage + {"F": -1, "B": 1}[action.kind]
            wanted = max(free[span.rank, action], ends.get((source, action), 0))
        assert span.start == wanted
        assert span.end == wanted + lasts[action.kind] * stages[stage]
