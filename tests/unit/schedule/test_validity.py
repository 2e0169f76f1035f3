"""Which schedules are refused, and the action that is named."""

import pytest

from sparsepipe.errors import ScheduleError
from sparsepipe.schedule import Schedule, asynchronous, check, gpipe, naive, one_f_one_b
from tests.support.plans import configs, plan_of


@pytest.mark.parametrize("minibatches", [1, 7, 24])
def test_asynchronous_schedules_of_all_plans_can_be_carried_out(minibatches):
    """A channel's thread that waits for the other end holds one message."""
    for config in configs(8):
        plan = plan_of(config)
        stale = max(plan.warmup(stage) for stage in range(plan.num_stages))
        check(asynchronous(plan, minibatches), outbox=1, max_staleness=stale)


def test_pipedreams_order_deadlocks_where_the_other_does_not():
    schedule = asynchronous(plan_of("1-3-1"), 12)
    check(schedule, outbox=1, gradient_first=True)
    with pytest.raises(ScheduleError, match="rank 1 waits for its stage's replicas at U0"):
        check(schedule, outbox=1, gradient_first=False)


def test_sends_that_block_deadlock():
    """Both stages of 1-1 send at once, and neither takes."""
    schedule = asynchronous(plan_of("1-1"), 4)
    with pytest.raises(ScheduleError, match="rank 0 cannot send to rank 1 at F1"):
        check(schedule, outbox=0)


@pytest.mark.parametrize(
    ("config", "table", "words"),
    [
        ("1", "B0 F0 U0", "rank 0: B0 has no forward"),
        ("1", "F0 F0 B0 U0", "F0 runs twice"),
        ("1", "F0 B0 B0 U0", "B0 has no forward"),
        ("1", "F0 U0", "F0 has no backward"),
        ("1", "F0 U0 B0", "B0 comes after its update U0"),
        ("1", "F0 B0 U1", "U1 appears where U0 is expected"),
        ("1-1", "F0 B0 U0\nF1 B1 U0", "rank 0: F1 is missing in stage 0"),
        ("1-1", "F0 F1 B0 U0 B1 U1\nF0 B0 U0", "rank 1: F1 is missing in stage 1"),
        ("1", "F1 B1 U0", "rank 0: F0 is missing in stage 0"),
        ("1", "F1.0 B1.0 U0 U1", "rank 0: F0.0 is missing in stage 0"),
        ("1", "F0 B0", "rank 0: U0 is missing"),
        ("1", "F0.0 F0.1 B0.1 B0.0", "rank 0: U0 is missing"),
        ("1", "F0 B0 U0 U1", "rank 0: U1 follows the updates of all rounds, 1 in all"),
        ("1", "F0 B0 U0 F1.0 B1.0 U1", "split"),
        ("1-1", "F0 F1 B0 U0 B1 U1\nF1 F0 B0 U0 B1 U1", "F1 gets the message of F0 first"),
        ("1-1", "F0 B0 U0 F1 B1 U1\nF0 F1 B0 U0 B1 U1", "rank 0 waits for rank 1 at B0"),
        ("2", "F0 B0 U0 F1 B1 U1\nU0 U1", "F1 belongs to rank 1"),
        ("2", "F0 B0 U0\nF1 B1", "rank 1: U0 is missing"),
        ("2", "F0 B0 U0 F2 B2 U1\nF1 B1 U0", "rank 1: U1 is missing"),
    ],
)
def test_errors_name_rank_and_action(config, table, words):
    with pytest.raises(ScheduleError, match=words):
        check(Schedule.parse(plan_of(config), table))


def test_a_bound_on_staleness_names_the_minibatch():
    schedule = asynchronous(plan_of("1-1-1"), 8)
    check(schedule, max_staleness=2)
    with pytest.raises(ScheduleError, match="rank 0: F2 has a staleness of 2"):
        check(schedule, max_staleness=1)


def test_synchronous_schedules_are_never_stale():
    plan = plan_of("2-1-1")
    for schedule in (gpipe(plan, 3, microbatches=4), one_f_one_b(plan, 3, microbatches=4)):
        check(schedule, max_staleness=0)
    check(naive(plan, 5), max_staleness=0)
    early = "F0.0 B0.0 F1.0 U0 B1.0 U1"
    check(Schedule.parse(plan_of("1"), early))
    with pytest.raises(ScheduleError, match=r"rank 0: F1\.0 has a staleness of 1"):
        check(Schedule.parse(plan_of("1"), early), max_staleness=0)
