"""Which updates copy weights, against real weights on the same actions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsepipe.runtime.weights import Weights
from sparsepipe.schedule import Plan, Schedule, asynchronous, gpipe, naive, one_f_one_b
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.run import Setting, simulate
from sparsepipe.simulate.steady import pace
from sparsepipe.simulate.workload import StageCosts, Workload

UPDATE_S, COPY_S = 0.25, 0.5


def workload_of(config: str) -> Workload:
    stages = config.count("-") + 1
    plan = Plan.of(config=config, cuts=range(1, stages), num_layers=stages)
    costs = tuple(
        StageCosts(
            forward_s=(1.0,) * stage.replicas,
            backward_s=(2.0,) * stage.replicas,
            update_s=UPDATE_S,
            copy_s=COPY_S,
        )
        for stage in plan.stages
    )
    return Workload(plan=plan, stages=costs)


def run(schedule: Schedule, workload: Workload) -> Record:
    network = Network.flat(schedule.plan.num_ranks)
    return simulate(schedule, workload, Setting(network=network))


def really_copied(schedule: Schedule, rank: int) -> list[bool]:
    """Of each update of a rank, whether its parameters moved on to other memory."""
    parameter = nn.Parameter(torch.zeros(1))
    weights = Weights({"weight": parameter}, "stash")
    found = []
    for action in schedule.actions[rank]:
        if action.kind == "F":
            weights.begin(action.number, version=weights.version)
        elif action.kind == "B":
            weights.again(action.number)
            weights.finish(action.number)
        else:
            before = parameter.data_ptr()
            with weights.updating():
                pass
            found.append(parameter.data_ptr() != before)
    return found


@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1-1", "2-1", "1-2-1", "3-2", "4"])
@pytest.mark.parametrize("minibatches", [1, 2, 5, 13])
def test_updates_copy_where_real_weights_do(config: str, minibatches: int) -> None:
    workload = workload_of(config)
    schedule = asynchronous(workload.plan, minibatches)
    record = run(schedule, workload)
    for rank in range(workload.plan.num_ranks):
        took_s = [
            span.end - span.start
            for span in record.spans
            if span.rank == rank and span.action.kind == "U"
        ]
        expected_s = [UPDATE_S + COPY_S * copied for copied in really_copied(schedule, rank)]
        assert took_s == pytest.approx(expected_s)
        busy_s = 3.0 * len([a for a in schedule.actions[rank] if a.kind == "F"]) + sum(expected_s)
        assert record.busy_s[rank] == pytest.approx(busy_s)


def test_stages_before_the_last_are_slower_by_it_in_the_long_run() -> None:
    workload = workload_of("1-1-1")
    found = pace(workload, 1000, Setting(network=Network.flat(3)))
    each_s = 3.0 + UPDATE_S + COPY_S
    assert found.minibatch_s == pytest.approx(each_s)
    assert found.busy == pytest.approx([1.0, 1.0, (each_s - COPY_S) / each_s])


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b])
def test_nothing_is_copied_where_all_minibatches_end_before_an_update(make) -> None:
    workload = workload_of("1-1-1")
    parts = {} if make is naive else {"microbatches": 3}
    record = run(make(workload.plan, 4, **parts), workload)
    updates = [span for span in record.spans if span.action.kind == "U"]
    assert len(updates) == 3 * 4
    assert all(span.end - span.start == pytest.approx(UPDATE_S) for span in updates)
