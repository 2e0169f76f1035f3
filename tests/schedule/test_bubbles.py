"""The share of time in which stages wait, from what they do when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsepipe.schedule import Action, Plan, Schedule, gpipe, one_f_one_b, timeline, unit_times
from sparsepipe.schedule.bubbles import bubbles, ideal_bubble, idle_shares


def straight(stages: int) -> Plan:
    return Plan.of(config="-".join("1" * stages), cuts=range(1, stages), num_layers=stages)


def busy(schedule: Schedule, stages: list[float] | None = None) -> list[list[tuple[float, float]]]:
    """Forwards and backwards of each rank; the backward takes twice as long."""
    spans = timeline(schedule, unit_times(update=5.0, stages=stages))
    return [
        [(span.start, span.end) for span in spans if span.rank == rank and span.action.kind != "U"]
        for rank in range(schedule.plan.num_ranks)
    ]


def test_two_stages_two_microbatches_as_drawn() -> None:
    """By hand: a forward takes 1, a backward 2, and the last stage turns round at 3.

    time     0  1  2  3  4  5  6  7  8
    stage 0  F0 F1 .  .  .  B1B1  B0B0   until 9
    stage 1  .  F0 F1 B1B1  B0B0         until 7
    """
    plan = straight(2)
    literal = Schedule.parse(plan, "F0.0 F0.1 B0.1 B0.0 U0\nF0.0 F0.1 B0.1 B0.0 U0")
    assert literal == gpipe(plan, 1, microbatches=2)
    drawn = [[(0, 1), (1, 2), (5, 7), (7, 9)], [(1, 2), (2, 3), (3, 5), (5, 7)]]
    assert busy(literal) == drawn
    assert bubbles(drawn) == pytest.approx([3 / 9, 3 / 9])


def test_updates_and_what_waits_for_them_do_not_count() -> None:
    assert bubbles([[(10, 11), (13, 15)], [(11, 13)]]) == pytest.approx([2 / 5, 3 / 5])


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_stages_that_are_alike_wait_as_the_formula_says(
    stages: int, microbatches: int, make: Callable[..., Schedule]
) -> None:
    found = bubbles(busy(make(straight(stages), 1, microbatches=microbatches)))
    assert found == pytest.approx([ideal_bubble(stages, microbatches)] * stages)


def test_the_slowest_stage_waits_least() -> None:
    """Others wait for it: with 16 parts of 3 units it computes 48 of 54."""
    shares = [1.0, 1.0, 0.5, 0.5]
    found = bubbles(busy(gpipe(straight(4), 1, microbatches=16), shares))
    assert found[0] == found[1] == min(found)
    assert found[2] == found[3] == max(found)
    assert max(found) == pytest.approx((1 + min(found)) / 2)


def test_no_bubble_without_others() -> None:
    assert ideal_bubble(1, 4) == 0
    assert ideal_bubble(8, 32) == pytest.approx(7 / 39)


def test_what_lies_outside_of_the_time_does_not_count() -> None:
    ranks = [[(0.0, 4.0), (6.0, 9.0)], [(3.0, 5.0)], []]
    assert idle_shares(ranks, begin=2, end=7) == pytest.approx([2 / 5, 3 / 5, 1])


def test_actions_are_those_of_one_minibatch() -> None:
    schedule = gpipe(straight(2), 1, microbatches=2)
    assert schedule.actions[0][-1] == Action("U", 0)
