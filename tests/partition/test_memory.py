"""The memory of a stage is that of the schedule that it will run."""

from __future__ import annotations

from itertools import product

import pytest

from sparsepipe.partition.memory import MemoryModel
from sparsepipe.schedule import Plan
from sparsepipe.schedule.asynchronous import asynchronous
from sparsepipe.schedule.versions import peak_stashed

CONFIGS = ["1", "3", "1-1", "2-1", "1-2", "1-1-1", "1-2-1", "2-1-1", "1-3-1", "2-3", "3-2-1-1"]


@pytest.mark.parametrize("config", CONFIGS)
def test_minibatches_in_flight_and_versions_are_the_schedules(config: str) -> None:
    replicas = [int(part) for part in config.split("-")]
    plan = Plan.of(config=config, cuts=range(1, len(replicas)), num_layers=len(replicas))
    schedule = asynchronous(plan, 60)
    model = MemoryModel(optimizer=2.0)
    for rank in range(plan.num_ranks):
        stage = plan.stage_of(rank)
        flying = model.in_flight(replicas[stage], sum(replicas[stage:]))
        assert flying == most_in_flight(schedule.actions[rank])
        versions = peak_stashed(schedule, rank)
        assert versions <= flying
        # Replicated stages may have fewer versions than minibatches: those of a round share one.
        if replicas[stage] == 1:
            assert versions == flying
        assert model.per_parameter_byte(flying) == flying + 3


def most_in_flight(actions: object) -> int:
    """By counting forwards without their backward."""
    flying = most = 0
    for action in actions:  # type: ignore[attr-defined]
        flying += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, flying)
    return most


@pytest.mark.parametrize(("stash", "optimizer"), list(product([True, False], [0.0, 1.0, 2.0])))
def test_bytes_by_hand(stash: bool, optimizer: float) -> None:
    model = MemoryModel(stash=stash, optimizer=optimizer, reserved_bytes=7.0)
    # Two replicas, five devices from here on: (5 - 1) // 2 + 1 = 3 minibatches in flight.
    weights = 3 if stash else 1
    expected = 7.0 + 100 * (weights + 1 + optimizer) + 3 * 40
    assert model.stage_bytes(100.0, 40.0, replicas=2, left=5) == expected
