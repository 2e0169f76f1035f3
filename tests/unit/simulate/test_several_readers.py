"""Synchronous pipelines whose first stage has several devices, as they train: worked out by hand.

What these read is one minibatch, cut together, with one sum and one update.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsepipe.cluster import Link
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.schedule import SYNCHRONOUS
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.memory import long_run_peaks_bytes
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.tasks.simulate import Comparison, SimulationFigures
from tests.support.plans import plan_of

BATCH_SIZE = 8
MEMORY = MemoryModel(stash=False, optimizer=0.0, gradients=0.0)


def simulation(config: str, schedule: str, microbatches: int, **costs: float) -> Simulation:
    """Stages of 1 s forward and 2 s backward for a batch, and other costs of each."""
    plan = plan_of(config)
    made = Workload.uniform(plan)
    stages = tuple(replace(stage, **costs) for stage in made.stages)
    network = ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=100.0))
    return Simulation.of(
        replace(made, stages=stages),
        Setting(network=network, algorithm="ring"),
        schedule=schedule,
        microbatches=microbatches,
    )


def outcome(made: Simulation, minibatches: int) -> SimulationFigures:
    return SimulationFigures.of(
        Comparison(plan=made, dp=None, dp_apart=None, without_dp="nobody asks"),
        minibatches=minibatches,
        shown=3,
        memory=MEMORY,
        batch_size=BATCH_SIZE,
        rooms=[None] * made.workload.plan.num_ranks,
    )


# Two batches in four parts of half a batch, which take 0.5 s and 1 s. The second stage begins with
# the first of them after 0.5 s, and its four take 6 s. A last backward of the first stage is 1 s;
# its sum of 100 bytes, half of them each way at a time, is 1 s, and the update 0.25 s.
STEP_S = 0.5 + 6.0 + 1.0 + 1.0 + 0.25


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_two_readers_make_one_minibatch_of_their_batches(schedule: str) -> None:
    made = simulation("2-1", schedule, 4, parameter_bytes=100.0, update_s=0.25)
    found = made.pace(100)
    assert found.minibatch_s == pytest.approx(STEP_S)
    assert found.busy == pytest.approx([(2 * 1.5 + 0.25) / STEP_S] * 2 + [6.25 / STEP_S])
    told = outcome(made, 5).values()  # five batches are three such minibatches
    assert told["epoch_s"] == pytest.approx(3 * STEP_S)
    assert told["epoch_minibatches"] == 5
    assert told["minibatch_s"] == pytest.approx(STEP_S / 2)
    assert told["simulated_shapes_per_s"] == pytest.approx(2 * BATCH_SIZE / STEP_S)


@pytest.mark.parametrize(
    ("config", "microbatches", "batches"),
    [
        ("2-1", 4, [1.0, 1.0, 2.0]),
        ("3-1", 4, [1.0, 1.0, 1.0, 3.0]),  # halves of the first batch, and two whole ones
        ("2-2", 3, [1.0, 1.0, 1.0, 1.0]),  # halves of the first batch on one device of the second
        ("1-2", 4, [1.0, 0.5, 0.5]),
    ],
)
def test_all_that_is_read_is_kept(config: str, microbatches: int, batches: list[float]) -> None:
    made = simulation(config, "gpipe", microbatches, stored_bytes=12.0)
    kept = [12.0 * each for each in batches]
    assert long_run_peaks_bytes(made, MEMORY) == pytest.approx(kept)
    found = outcome(made, 6)
    assert found.peaks_bytes == pytest.approx(kept)
    most = [max(level.num_bytes for level in levels) for levels in found.memory]
    assert most == pytest.approx(kept), "over time as well"
