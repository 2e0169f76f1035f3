"""What searches take for in flight is what the schedules have: all small plans are played."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from sparsepipe.partition.memory import Microbatches, sizes_of
from sparsepipe.schedule import SYNCHRONOUS, Action, MinibatchSupply, Plan
from tests.support.plans import plan_of

CONFIGS = ["-".join(map(str, each)) for n in range(1, 5) for each in product((1, 2, 3), repeat=n)]


def actions_of(schedule: str, plan: Plan, rank: int, count: int) -> list[Action]:
    """Of two minibatches: what the first one leaves would count."""
    return list(SYNCHRONOUS[schedule](plan, rank, MinibatchSupply(2), count))


def forwards(actions: Iterable[Action]) -> list[int]:
    """Microbatches of the first minibatch, in the order in which they go forward."""
    return [
        action.microbatch
        for action in actions
        if action.kind == "F" and action.number == 0 and action.microbatch is not None
    ]


def most_held(actions: Iterable[Action], sizes: list[float]) -> float:
    """The most that forwards without their backward hold at a time."""
    held = most = 0.0
    for action in actions:
        if action.microbatch is not None:
            held += sizes[action.microbatch] * (1 if action.kind == "F" else -1)
            most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("batch_size", [None, 5])
def test_microbatches_in_flight_are_the_schedules(schedule: str, batch_size: int | None) -> None:
    for config, count in product(CONFIGS, range(1, 9)):
        plan = plan_of(config)
        cut = Microbatches(schedule=schedule, count=count, batch_size=batch_size)
        readers = plan.replicas(0)
        sizes = [0.0] * count
        for reader in plan.ranks_of(0):
            own = forwards(actions_of(schedule, plan, reader, count))
            for part in own:  # into which it cuts its batch, the largest one first
                whole = 1 if batch_size is None else batch_size
                sizes[part] = 1 / len(own) if batch_size is None else -(-whole // len(own)) / whole
        assert sizes_of(count, readers, batch_size=batch_size) == sizes, (config, count)
        assert cut.share(readers) == max(sizes), (config, count)
        for stage in range(plan.num_stages):
            every = [actions_of(schedule, plan, rank, count) for rank in plan.ranks_of(stage)]
            assert sorted(part for own in every for part in forwards(own)) == list(range(count))
            held = max(most_held(own, sizes) for own in every)
            told = cut.in_flight(plan, stage) * cut.share(readers)
            assert told == pytest.approx(held), (config, count, stage)
