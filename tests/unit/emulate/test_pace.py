"""Pauses by a clock of our own."""

from __future__ import annotations

import pytest

from sparsepipe.emulate.pace import Pace
from sparsepipe.errors import ConfigError


class Clock:
    """Sleeps that end late by turns."""

    def __init__(self, *late_s: float) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self._late_s = list(late_s)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now_s += seconds + (self._late_s.pop(0) if self._late_s else 0.0)


def paced(clock: Clock, time_scale: float = 1.0) -> Pace:
    return Pace(time_scale, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize("time_scale", [0.5, 1.0, 10.0])
def test_pauses_take_what_is_said_times_the_scale(time_scale: float) -> None:
    clock = Clock()
    pace = paced(clock, time_scale)
    for seconds in (0.25, 0.5, 0.125):
        pace.take(seconds)
    assert clock.now_s - 100 == pytest.approx(0.875 * time_scale)
    assert len(clock.sleeps) == 3


def test_short_pauses_are_saved_up() -> None:
    clock = Clock()
    pace = paced(clock)
    for _ in range(1000):
        pace.take(0.0003)
    assert clock.now_s - 100 == pytest.approx(0.3, abs=0.001)
    assert all(seconds >= 0.001 for seconds in clock.sleeps)


def test_the_next_pauses_make_up_for_one_that_ended_late() -> None:
    clock = Clock(0.03)
    pace = paced(clock)
    for _ in range(10):
        pace.take(0.02)
    assert clock.now_s - 100 == pytest.approx(0.2)
    assert clock.sleeps[:3] == pytest.approx([0.02, 0.01, 0.02])


def test_a_process_that_was_stopped_makes_up_for_a_moment_only() -> None:
    clock = Clock(50.0)
    pace = paced(clock)
    for _ in range(100):
        pace.take(0.02)
    assert clock.now_s - 100 == pytest.approx(50 + 2 - 0.1)


def test_nothing_takes_no_time() -> None:
    clock = Clock()
    pace = paced(clock)
    for _ in range(10):
        pace.take(0.0)
    assert clock.sleeps == []


@pytest.mark.parametrize(
    ("worked_s", "slept_s"), [(0.0, 0.5), (0.125, 0.375), (0.5, None), (0.75, None)]
)
def test_work_is_part_of_the_time_that_it_is_replayed_in(
    worked_s: float, slept_s: float | None
) -> None:
    clock = Clock()
    pace = paced(clock, time_scale=10.0)
    begun_s = pace.now_s()
    clock.now_s += worked_s
    pace.take(0.05, since_s=begun_s)
    pace.take(0.2)
    assert clock.sleeps == [2.0] if slept_s is None else [slept_s, 2.0], "no other pause is shorter"


def test_what_work_leaves_of_short_times_is_saved_up() -> None:
    clock = Clock()
    pace = paced(clock)
    for _ in range(1000):
        begun_s = pace.now_s()
        clock.now_s += 0.0001
        pace.take(0.0004, since_s=begun_s)
    assert clock.now_s - 100 == pytest.approx(0.4, abs=0.001)
    assert all(seconds >= 0.001 for seconds in clock.sleeps)


@pytest.mark.parametrize("time_scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_number_above_zero(time_scale: float) -> None:
    with pytest.raises(ConfigError, match="time_scale=") as caught:
        Pace(time_scale)
    assert "above 0" in caught.value.remedy
