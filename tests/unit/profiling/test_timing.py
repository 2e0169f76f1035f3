"""Speeds of a device: what is counted, and over what time."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from sparsepipe.profiling import timing as speed
from sparsepipe.profiling.timing import copy_speed, multiply_speed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("measure", "amount"),
    [
        (lambda: multiply_speed(CPU, size=96, warmups=2, repeats=4), 2 * 96**3),
        (lambda: copy_speed(CPU, size_bytes=4000, warmups=2, repeats=4), 2 * 4000),
    ],
)
def test_speed_is_amount_by_time(measure, amount, monkeypatch) -> None:
    times_s = [0.5, 0.25, 1.0, 0.125]
    marks = []
    monkeypatch.setattr(speed.Clock, "seconds", lambda clock: marks.extend(clock._marks) or times_s)
    found = measure()
    rates = [amount / time_s for time_s in times_s]
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    assert found.per_s == pytest.approx(middle)
    assert found.spread_per_s == pytest.approx(high - low)
    assert len(marks) == 4 + 1


def test_a_clock_measures_between_marks() -> None:
    clock = speed.Clock(CPU)
    clock.mark()
    for _ in range(2):
        time.sleep(0.02)
        clock.mark()
    times_s = clock.seconds()
    assert len(times_s) == 2
    assert all(time_s >= 0.02 for time_s in times_s)
    assert clock.seconds() == []
