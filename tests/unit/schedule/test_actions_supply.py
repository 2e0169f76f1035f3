"""Runs whose length is decided while they go on."""

from __future__ import annotations

from itertools import islice

import pytest

from sparsepipe.schedule import (
    MinibatchSupply,
    asynchronous,
    asynchronous_order,
    check,
    gpipe,
    gpipe_order,
    naive,
    naive_order,
)
from sparsepipe.schedule.actions import Schedule
from tests.support.plans import plan_of


def test_a_lowered_limit_counts_for_every_rank() -> None:
    supply = MinibatchSupply(100)
    slow, fast = supply.portions(2), supply.portions(3)
    assert [next(fast), next(fast), next(slow)] == [3, 3, 2]
    assert supply.announced == 6
    supply.limit = 7
    assert list(fast) == [1]
    assert list(slow) == [2, 2, 1]
    assert supply.announced == 7


@pytest.mark.parametrize("config", ["1-1-1", "2-1", "1-3-1", "3-2"])
@pytest.mark.parametrize(
    ("order", "whole"),
    [
        (asynchronous_order, asynchronous),
        (naive_order, naive),
        (
            lambda plan, rank, supply: gpipe_order(plan, rank, supply, 4),
            lambda plan, count: gpipe(plan, count, microbatches=4),
        ),
    ],
)
def test_a_run_that_is_cut_short_is_the_shorter_run(config: str, order, whole) -> None:
    plan = plan_of(config)
    supply = MinibatchSupply(1000)
    orders = [iter(order(plan, rank, supply)) for rank in range(plan.num_ranks)]
    begun = [list(islice(each, 5 + rank)) for rank, each in enumerate(orders)]
    supply.limit = supply.announced + 2
    ended = [tuple(first) + tuple(rest) for first, rest in zip(begun, orders, strict=True)]
    cut = Schedule(plan, tuple(ended))
    check(cut)
    assert cut == whole(plan, supply.limit)
