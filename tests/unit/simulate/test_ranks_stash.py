"""Which updates copy weights, against real weights on the same actions."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from sparsepipe.runtime.weights import Weights
from sparsepipe.schedule import (
    Action,
    MinibatchSupply,
    Plan,
    RankOrder,
    Schedule,
    asynchronous,
    included_at,
)
from sparsepipe.simulate.engine import Record, Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation, pace
from sparsepipe.simulate.workload import StageCosts, Workload
from tests.support.plans import plan_of

UPDATE_S, COPY_S = 0.25, 0.5


def workload_of(config: str, *, vertical_sync: bool = False) -> Workload:
    plan = plan_of(config)
    costs = tuple(
        StageCosts(
            forward_s=(1.0,) * stage.replicas,
            backward_s=(2.0,) * stage.replicas,
            update_s=UPDATE_S,
            copy_s=COPY_S,
            parameter_bytes=1.0,
        )
        for stage in plan.stages
    )
    return Workload(plan=plan, stages=costs, vertical_sync=vertical_sync)


def run(schedule: Schedule, workload: Workload) -> Record:
    network = ClusterNetwork.flat(schedule.plan.num_ranks)
    return simulate(schedule, workload, Setting(network=network))


def really_copied(plan: Plan, minibatches: int, rank: int, mode: str) -> list[bool]:
    """Of each update of a rank, whether its parameters moved on to other memory.

    Weights are used as by the pipeline's worker, round after round of stage 0.
    """
    parameter = nn.Parameter(torch.zeros(1))
    weights = Weights({"weight": parameter}, mode, replicas=plan.replicas(plan.stage_of(rank)))
    order = RankOrder(plan, rank)
    found: list[bool] = []

    def do(actions: Iterable[Action]) -> None:
        for action in actions:
            number = action.number
            if action.kind == "F":
                included = included_at(plan, number)
                weights.begin(number, version=order.updates, included=included)
                weights.keep_from(included_at(plan, order.following(number)))
            elif action.kind == "B":
                weights.begin_backward(number)
                weights.finish(number)
            else:
                before = parameter.data_ptr()
                with weights.updating():
                    pass
                found.append(parameter.data_ptr() != before)

    for count in MinibatchSupply(minibatches).portions(plan.replicas(0)):
        do(order.feed(count))
    weights.keep_from(None)
    do(order.drain())
    return found


@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1-1", "2-1", "1-2-1", "3-2", "2-3", "4"])
@pytest.mark.parametrize("minibatches", [1, 2, 5, 13])
@pytest.mark.parametrize("mode", ["stash", "vertical_sync"])
def test_updates_copy_where_real_weights_do(config: str, minibatches: int, mode: str) -> None:
    workload = workload_of(config, vertical_sync=mode == "vertical_sync")
    schedule = asynchronous(workload.plan, minibatches)
    record = run(schedule, workload)
    for rank in range(workload.plan.num_ranks):
        took_s = [
            span.end - span.start for span in record.spans if span.rank == rank and span.kind == "U"
        ]
        copied = really_copied(workload.plan, minibatches, rank, mode)
        expected_s = [UPDATE_S + COPY_S * each for each in copied]
        assert took_s == pytest.approx(expected_s)
        busy_s = 3.0 * len([a for a in schedule.actions[rank] if a.kind == "F"]) + sum(expected_s)
        assert record.busy_s[rank] == pytest.approx(busy_s)


def test_under_vertical_sync_the_last_stage_copies_at_each_update_too() -> None:
    workload = workload_of("1-1-1", vertical_sync=True)
    assert really_copied(workload.plan, 9, 2, "vertical_sync") == [True] * 9
    found = pace(workload, 1000, Setting(network=ClusterNetwork.flat(3)))
    assert found.minibatch_s == pytest.approx(3.0 + UPDATE_S + COPY_S)
    assert found.busy == pytest.approx([1.0, 1.0, 1.0])


def test_one_stage_alone_copies_nothing_under_vertical_sync() -> None:
    found = pace(workload_of("2", vertical_sync=True), 100, Setting(network=ClusterNetwork.flat(2)))
    assert found.minibatch_s == pytest.approx((3.0 + UPDATE_S) / 2)


def test_stages_before_the_last_are_slower_by_it_in_the_long_run() -> None:
    workload = workload_of("1-1-1")
    found = pace(workload, 1000, Setting(network=ClusterNetwork.flat(3)))
    each_s = 3.0 + UPDATE_S + COPY_S
    assert found.minibatch_s == pytest.approx(each_s)
    assert found.busy == pytest.approx([1.0, 1.0, (each_s - COPY_S) / each_s])


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "eager_1f1b"])
def test_other_schedules_keep_no_older_weights(schedule: str) -> None:
    """Whatever the mode: minibatches end before the next update."""
    workload = workload_of("1-1", vertical_sync=True)
    found = Simulation.of(
        workload, Setting(network=ClusterNetwork.flat(2)), schedule=schedule
    ).record(3)
    updates = [span for span in found.spans if span.kind == "U"]
    assert [span.end - span.start for span in updates] == pytest.approx([UPDATE_S] * 6)
