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
    counted = []

    def fixed(work, device, warmups, repeats):
        counted.append((warmups, repeats))
        work()
        return times_s

    monkeypatch.setattr(speed, "_times_s", fixed)
    found = measure()
    rates = [amount / time_s for time_s in times_s]
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    assert found.per_s == pytest.approx(middle)
    assert found.spread_per_s == pytest.approx(high - low)
    assert counted == [(2, 4)]


def test_what_is_timed_takes_as_long_as_it_does() -> None:
    calls = []

    def work() -> None:
        calls.append(time.sleep(0.02))

    times_s = speed._times_s(work, CPU, 2, 3)
    assert len(calls) == 5
    assert len(times_s) == 3
    assert all(time_s >= 0.02 for time_s in times_s)


def test_tf32_is_as_it_was_afterwards() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        multiply_speed(CPU, size=8, warmups=0, repeats=1)
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
