"""What ranks keep over time: by hand, by the partitioner's model, by the schedule's versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.cluster import Link
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.schedule import Plan, Schedule, asynchronous, gpipe, peaks
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.memory import Level, long_run_peaks_bytes, memory_over_time
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of

MODEL = MemoryModel(optimizer=0.0, gradients=0.0)


def work(plan: Plan, *, parameter_bytes: float, stored_bytes: float) -> Workload:
    made = Workload.uniform(plan, parameter_bytes=parameter_bytes)
    return replace(
        made, stages=tuple(replace(stage, stored_bytes=stored_bytes) for stage in made.stages)
    )


def kept(
    schedule: Schedule,
    model: MemoryModel = MODEL,
    *,
    parameter_bytes: float = 100.0,
    stored_bytes: float = 1.0,
) -> list[tuple[Level, ...]]:
    """On links that take a little time, so that ranks are not in step."""
    plan = schedule.plan
    workload = work(plan, parameter_bytes=parameter_bytes, stored_bytes=stored_bytes)
    network = ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=1e3, latency_s=0.1))
    record = simulate(schedule, workload, Setting(network=network))
    return memory_over_time(record, workload, model)


def peak_bytes(levels: tuple[Level, ...]) -> float:
    return max((level.num_bytes for level in levels), default=0.0)


def test_two_stages_by_hand() -> None:
    """Stage 0 runs F0 F1 B0 U0 F2 B1 U1 B2 U2 and is at F1 when it waits for B0."""
    first, second = kept(asynchronous(plan_of("1-1"), 3), stored_bytes=10.0)
    assert [level.num_bytes for level in first] == [
        100.0,  # weights
        110.0,  # F0
        120.0,  # F1
        110.0,  # B0 has ended
        210.0,  # U0: minibatch 1 still needs the version before it
        220.0,  # F2, on the new version
        110.0,  # B1 has ended, and the old version is free
        210.0,  # U1: minibatch 2 still needs version 1
        100.0,  # B2
        100.0,  # U2
    ]
    assert [level.num_bytes for level in second] == [100.0, *[110.0, 100.0, 100.0] * 3]
    assert first[:3] == (Level(0.0, 100.0), Level(0.0, 110.0), Level(1.0, 120.0))


@pytest.mark.parametrize("config", ["1", "1-1-1", "2-1", "4", "1-1-1-1"])
@pytest.mark.parametrize("optimizer", [0.0, 2.0])
def test_the_peak_is_that_of_the_partitioner(config: str, optimizer: float) -> None:
    plan = plan_of(config)
    model = MemoryModel(optimizer=optimizer, reserved_bytes=7.0)
    levels = kept(asynchronous(plan, 60), model, parameter_bytes=100.0, stored_bytes=40.0)
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        left = sum(plan.replicas(later) for later in range(stage, plan.num_stages))
        expected = model.stage_bytes(100.0, 40.0, replicas=plan.replicas(stage), left=left)
        assert peak_bytes(levels[rank]) == expected


@pytest.mark.parametrize("config", ["1-1-1", "2-1", "1-2-1", "3-2", "1-3-1", "2-2-1"])
def test_versions_are_those_of_the_schedule(config: str) -> None:
    """Only weights have a size here, so that the peak counts their versions."""
    plan = plan_of(config)
    schedule = asynchronous(plan, 60)
    without = [100.0 * 2 * (plan.replicas(plan.stage_of(r)) > 1) for r in range(plan.num_ranks)]
    stashed = kept(schedule, stored_bytes=0.0)
    predicted = kept(schedule, replace(MODEL, predicted=True), stored_bytes=0.0)
    one = kept(schedule, replace(MODEL, stash=False), stored_bytes=0.0)
    for rank, buffers in enumerate(without):
        assert peak_bytes(stashed[rank]) - buffers == 100.0 * peaks(schedule, rank).stashed
        assert peak_bytes(predicted[rank]) - buffers == 100.0 * peaks(schedule, rank).predicted
        assert peak_bytes(one[rank]) - buffers == 100.0


def test_microbatches_of_one_minibatch_share_its_weights() -> None:
    first, last = kept(gpipe(plan_of("1-1"), 2, microbatches=3))
    assert peak_bytes(first) == peak_bytes(last) == 103.0


def test_time_never_goes_back_and_everything_is_free_at_the_end() -> None:
    for levels in kept(asynchronous(plan_of("2-1"), 7), stored_bytes=3.0):
        times_s = [level.time_s for level in levels]
        assert times_s == sorted(times_s)
        assert levels[-1].num_bytes == levels[0].num_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("config", ["1-1-1", "2-1", "1-2-1", "3-2", "4"])
def test_the_peaks_of_a_long_run_are_those_of_its_simulation(schedule: str, config: str) -> None:
    """Also of replicas that have fewer microbatches than others."""
    plan = plan_of(config)
    network = ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=1e3, latency_s=0.1))
    simulation = Simulation.of(
        work(plan, parameter_bytes=100.0, stored_bytes=7.0),
        Setting(network=network),
        schedule=schedule,
    )
    model = MemoryModel(reserved_bytes=3.0)
    levels = memory_over_time(
        simulation.record(40), simulation.workload, model, sizes=simulation.sizes
    )
    assert long_run_peaks_bytes(simulation, model) == [peak_bytes(each) for each in levels]
