"""Synchronous schedules against literal tables."""

import pytest

from sparsepipe.schedule import check, eager_one_f_one_b, gpipe, naive, one_f_one_b
from tests.support.plans import configs, plan_of

NAIVE = """
F0 B0 U0 F1 B1 U1
F0 B0 U0 F1 B1 U1
F0 B0 U0 F1 B1 U1
"""

GPIPE = """
F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0 U1
F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0 U1
"""

ONE_F_ONE_B = """
F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 U0
F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3 U0
F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 U0
"""

EAGER = """
F0.0 F0.1 F0.2 F0.3 F0.4 B0.0 F0.5 B0.1 B0.2 B0.3 B0.4 B0.5 U0
F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 F0.5 B0.3 B0.4 B0.5 U0
F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 B0.4 F0.5 B0.5 U0
"""

# Two replicas in front hand microbatches round; one has none in a minibatch of one part.
REPLICATED = """
F0.0 F0.2 B0.2 B0.0 U0
F0.1 B0.1 U0
F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 U0
"""

# More warm-up than microbatches: all forwards come first.
SHORT = """
F0.0 F0.1 B0.0 B0.1 U0
F0.0 F0.1 B0.0 B0.1 U0
F0.0 F0.1 B0.0 B0.1 U0
F0.0 B0.0 F0.1 B0.1 U0
"""


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (naive(plan_of("1-1-1"), 2), NAIVE),
        (gpipe(plan_of("1-1"), 2, microbatches=3), GPIPE),
        (one_f_one_b(plan_of("1-1-1"), 1, microbatches=4), ONE_F_ONE_B),
        (eager_one_f_one_b(plan_of("1-1-1"), 1, microbatches=6), EAGER),
        (gpipe(plan_of("2-1"), 1, microbatches=3), REPLICATED),
        (one_f_one_b(plan_of("1-1-1-1"), 1, microbatches=2), SHORT),
    ],
)
def test_literal_tables(schedule, table):
    assert schedule.text().strip() == table.strip()


@pytest.mark.parametrize("config", list(configs(5)))
def test_every_plan_can_be_carried_out(config):
    plan = plan_of(config)
    for microbatches in (1, 3, 8):
        check(gpipe(plan, 2, microbatches=microbatches), outbox=1)
        check(one_f_one_b(plan, 2, microbatches=microbatches), outbox=1)
        check(eager_one_f_one_b(plan, 2, microbatches=microbatches), outbox=1)
    check(naive(plan, 5), outbox=1)
