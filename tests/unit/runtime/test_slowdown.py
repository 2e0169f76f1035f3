"""Pauses against the processor time that they follow; only lower bounds on a clock hold always."""

from __future__ import annotations

import threading
import time

import pytest

from sparsepipe.runtime import slowdown as room
from sparsepipe.runtime.slowdown import Slowdown, pause


def compute(seconds: float) -> None:
    """Uses as much of this thread's processor time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def timed(slowdown: Slowdown, seconds: float) -> tuple[float, float]:
    """Seconds by the clock and of processor time, of a block that computes."""
    begin_s = time.perf_counter()
    with slowdown.slowed():
        computed_s = time.thread_time()
        compute(seconds)
        computed_s = time.thread_time() - computed_s
    return time.perf_counter() - begin_s, computed_s


@pytest.mark.parametrize("slowdown", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("seconds", [2e-5, 3e-3, 5e-2])
def test_a_block_takes_as_many_times_as_long(slowdown: float, seconds: float) -> None:
    elapsed_s, computed_s = timed(Slowdown(slowdown), seconds)
    assert elapsed_s >= slowdown * computed_s


def test_waits_are_no_computation() -> None:
    """With a pause of a hundred times the wait, this would not end in time."""
    done = threading.Event()
    begin_s = time.perf_counter()
    with Slowdown(100.0).slowed():
        done.wait(0.2)
    assert 0.2 <= time.perf_counter() - begin_s < 10


def test_a_block_within_another_is_paid_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paid twice, the inner block's computation would count nine-fold, not three-fold."""
    asked_s: list[float] = []

    def asking(seconds: float) -> None:
        asked_s.append(seconds)
        pause(seconds)

    monkeypatch.setattr(room, "pause", asking)
    slowdown = Slowdown(3.0)
    with slowdown.slowed():
        own_s = time.thread_time()
        compute(0.01)
        own_s = time.thread_time() - own_s
        inner_s = [timed(slowdown, 0.1)[1] for _ in range(2)]
    *inner_asked_s, outer_asked_s = asked_s
    assert all(asked >= 2 * own for asked, own in zip(inner_asked_s, inner_s, strict=True))
    assert outer_asked_s >= 2 * own_s
    assert outer_asked_s < 2 * sum(inner_s), "the inner blocks are not paid for again"
