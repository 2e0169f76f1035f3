"""The memory of a stage is that of the schedule that it will run."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparsepipe.partition.memory import MemoryModel
from sparsepipe.profiling.memory import Alive
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.schedule.asynchronous import asynchronous
from sparsepipe.schedule.versions import peaks
from tests.support.plans import plan_of
from tests.support.processes import run

CONFIGS = ["1", "3", "1-1", "2-1", "1-2", "1-1-1", "1-2-1", "2-1-1", "1-3-1", "2-3", "3-2-1-1"]


@pytest.mark.parametrize("config", CONFIGS)
def test_minibatches_in_flight_and_versions_are_the_schedules(config: str) -> None:
    replicas = [int(part) for part in config.split("-")]
    plan = plan_of(config)
    schedule = asynchronous(plan, 60)
    model = MemoryModel(optimizer=2.0)
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        in_flight = model.in_flight(replicas[stage], sum(replicas[stage:]))
        assert in_flight == most_in_flight(schedule.actions[rank])
        versions = peaks(schedule, rank).stashed
        assert versions <= in_flight
        # Replicated stages may have fewer versions than minibatches: those of a round share one.
        if replicas[stage] == 1:
            assert versions == in_flight
        assert model.per_parameter_byte(in_flight, replicas=1) == in_flight + 3
        predicted = replace(model, predicted=True).per_parameter_byte(in_flight, replicas=1)
        assert predicted == peaks(schedule, rank).predicted + 3


def most_in_flight(actions: object) -> int:
    """By counting forwards without their backward."""
    in_flight = most = 0
    for action in actions:  # type: ignore[attr-defined]
        in_flight += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, in_flight)
    return most


@pytest.mark.parametrize(("stash", "optimizer"), list(product([True, False], [0.0, 1.0, 2.0])))
def test_bytes_by_hand(stash: bool, optimizer: float) -> None:
    model = MemoryModel(stash=stash, optimizer=optimizer, reserved_bytes=7.0)
    # Two replicas, five devices from here on: (5 - 1) // 2 + 1 = 3 minibatches in flight.
    weights = 3 if stash else 1
    expected = 7.0 + 100 * (weights + 1 + optimizer + 2) + 3 * 40
    assert model.stage_bytes(100.0, 40.0, replicas=2, left=5) == expected
    # One replica averages with nobody, and has the five of them in flight.
    weights = 5 if stash else 1
    expected = 7.0 + 100 * (weights + 1 + optimizer) + 5 * 40
    assert model.stage_bytes(100.0, 40.0, replicas=1, left=5) == expected


def test_each_prediction_is_beside_the_weights_in_use() -> None:
    model = MemoryModel(predicted=True, gradients=0.0, optimizer=0.0)
    assert model.stage_bytes(100.0, 0.0, replicas=1, left=5) == 100 * (5 + 1)
    assert replace(model, stash=False).stage_bytes(100.0, 0.0, replicas=1, left=5) == 100


SHAPES = {"a": (40, 30), "b": (300,)}


def kept_for_averaging(rank: int) -> int:
    """Bytes of tensors that replicas still hold when gradients have been averaged."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    replicas = Replicas(dist.group.WORLD, parameters)
    gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with Alive() as alive:
        averaged = replicas.average(gradients)
        assert all(gradient is not None for gradient in averaged.values())
        del averaged
        gc.collect()
        return alive.bytes


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_keep_what_is_counted(ranks: int) -> None:
    parameter_bytes = 4 * (40 * 30 + 300)
    model = MemoryModel()
    counted = model.per_parameter_byte(1, replicas=ranks) - model.per_parameter_byte(1, replicas=1)
    for kept in run(kept_for_averaging, ranks):
        # And a few numbers: who has gradients, and what makes the parts alike.
        assert 0 <= kept - counted * parameter_bytes < 2 * 4 * (1 + len(SHAPES) + ranks)
