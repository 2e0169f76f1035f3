"""The share of time in which stages wait, from what they do when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsepipe.callbacks.timing import idle_shares
from sparsepipe.schedule import Plan, Schedule, gpipe, one_f_one_b
from tests.support.timelines import timeline


def straight(stages: int) -> Plan:
    return Plan.of(config="-".join("1" * stages), cuts=range(1, stages), num_layers=stages)


def busy(schedule: Schedule, stages: list[float] | None = None) -> list[list[tuple[float, float]]]:
    """Forwards and backwards of each rank; the backward takes twice as long."""
    spans = timeline(schedule, update=5.0, stages=stages)
    return [
        [(span.start, span.end) for span in spans if span.rank == rank and span.kind != "U"]
        for rank in range(schedule.plan.num_ranks)
    ]


def test_two_stages_one_forward_one_backward_as_drawn() -> None:
    """By hand, with three microbatches: a forward takes 1, a backward 2.

    time     0  1  2  3  4  5  6  7  8  9 10 11 12
    stage 0  F0 F1 .  .  B0B0  F2 B1B1  .  B2B2     until 12
    stage 1  .  F0 B0B0  F1 B1B1  F2 B2B2           until 10
    """
    drawn = [
        [(0, 1), (1, 2), (4, 6), (6, 7), (7, 9), (10, 12)],
        [(1, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 10)],
    ]
    assert busy(one_f_one_b(straight(2), 1, microbatches=3)) == drawn
    assert idle_shares(drawn) == pytest.approx([3 / 12, 3 / 12])


def test_unlike_stages_of_one_forward_one_backward() -> None:
    """The last stage takes twice as long: 2 x 6 of 15, and the first 2 x 3 of these."""
    found = idle_shares(busy(one_f_one_b(straight(2), 1, microbatches=2), [1.0, 2.0]))
    assert found == pytest.approx([9 / 15, 3 / 15])


def test_updates_and_what_waits_for_them_do_not_count() -> None:
    assert idle_shares([[(10, 11), (13, 15)], [(11, 13)]]) == pytest.approx([2 / 5, 3 / 5])


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_equal_stages_wait_as_the_formula_predicts(
    stages: int, microbatches: int, make: Callable[..., Schedule]
) -> None:
    """(K - 1)/(T + K - 1): GPipe, 2.3."""
    found = idle_shares(busy(make(straight(stages), 1, microbatches=microbatches)))
    assert found == pytest.approx([(stages - 1) / (microbatches + stages - 1)] * stages)


def test_what_lies_outside_of_the_time_does_not_count() -> None:
    ranks = [[(0.0, 4.0), (6.0, 9.0)], [(3.0, 5.0)], []]
    assert idle_shares(ranks, begin=2, end=7) == pytest.approx([2 / 5, 3 / 5, 1])
