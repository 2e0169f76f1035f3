"""Replicas that get no microbatch, of stages that have no parameters to sum.

Schedules may have some, which trainings refuse.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.schedule import Action
from sparsepipe.simulate.engine import Engine, Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of

EXACT = 1e-9
# Two microbatches of 0.5 s and 1 s on one rank, and at the same time on two of three others.
MINIBATCH_S = {"gpipe": 4.5, "1f1b": 4.0, "eager_1f1b": 4.0}


def simulation(schedule: str, *, update_s: float, parameter_bytes: float = 0.0) -> Simulation:
    """Of the plan 1-3, whose last rank gets no microbatch."""
    made = Workload.uniform(plan_of("1-3"), parameter_bytes=parameter_bytes)
    stages = tuple(replace(stage, update_s=update_s) for stage in made.stages)
    return Simulation(
        workload=replace(made, stages=stages).split(2),
        setting=Setting(network=ClusterNetwork.flat(4)),
        recipe=SCHEDULES[schedule],
        microbatches=2,
    )


@pytest.mark.parametrize("schedule", MINIBATCH_S)
@pytest.mark.parametrize("update_s", [0.0, 0.25])
@pytest.mark.parametrize("minibatches", [3, 600, 4000])
def test_a_run_with_an_idle_replica_is_cut_short(
    schedule: str, update_s: float, minibatches: int
) -> None:
    found = simulation(schedule, update_s=update_s).pace(minibatches)
    minibatch_s = MINIBATCH_S[schedule] + update_s
    assert found.total_s == pytest.approx(minibatches * minibatch_s, rel=EXACT)
    assert found.minibatch_s == pytest.approx(minibatch_s, rel=EXACT)
    assert found.busy[0] == pytest.approx((3.0 + update_s) / minibatch_s, rel=EXACT)
    assert found.busy[3] == 0.0
    assert found.simulated < 20


@pytest.mark.parametrize("parameter_bytes", [0.0, 8.0])
def test_an_idle_replica_updates_only_where_others_sum_with_it(parameter_bytes: float) -> None:
    made = simulation("gpipe", update_s=0.25, parameter_bytes=parameter_bytes)
    spans = [span.action for span in made.record(3).spans if span.rank == 3]
    assert spans == ([Action("U", number) for number in range(3)] if parameter_bytes else [])


@pytest.mark.parametrize("keep", [False, True])
def test_updates_that_take_no_time_may_be_many(keep: bool) -> None:
    """More than Python would let call one another."""
    plan = plan_of("1")
    actions = [Action("F", 0), Action("B", 0), *(Action("U", number) for number in range(5000))]
    setting = Setting(network=ClusterNetwork.flat(1))
    engine = Engine(Workload.uniform(plan), [actions], setting, keep=keep, detector=None)
    found = engine.run()
    assert found.end_s == 3.0
    assert len(found.spans) == (5002 if keep else 0)
