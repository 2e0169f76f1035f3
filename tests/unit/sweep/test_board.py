"""Progress of a sweep as plain values: the time that is left, and a summary in a line."""

from __future__ import annotations

import pytest

from sparsepipe.sweep.board import (
    Board,
    Going,
    Row,
    duration_text,
    left_s,
    own_texts,
    sweep_left_s,
)


def test_time_left() -> None:
    half = Going(elapsed_s=30, share=0.5)
    assert left_s(half, None) == 30
    assert left_s(Going(elapsed_s=30, share=0.75, share_before=0.5), None) == 30, "it was resumed"
    assert left_s(Going(elapsed_s=30), 100) == 70
    assert left_s(Going(elapsed_s=30), None) is None
    assert left_s(Going(elapsed_s=300), 100) == 0
    assert sweep_left_s([], [], waiting=3) is None
    assert sweep_left_s([60, 120], [], waiting=2) == 180
    assert sweep_left_s([60], [half, half], waiting=2) == 90, "two at a time"
    assert sweep_left_s([], [half], waiting=1) == 90, "by its own pace"
    assert sweep_left_s([], [Going(elapsed_s=1)], waiting=0) is None
    late = Going(elapsed_s=10, share=0.01)
    assert sweep_left_s([10], [late, half], waiting=0) == pytest.approx(990), "as long as the last"


def test_durations_in_words() -> None:
    assert [duration_text(s) for s in (0.2, 90, 120, 3600, 7200)] == [
        "0 s", "90 s", "2 min", "60 min", "2.0 h",
    ]  # fmt: skip


def test_a_sweep_in_a_line() -> None:
    rows = [
        Row(number=1, text="a", state="failed", seconds=3),
        Row(number=2, text="b", state="finished", seconds=60),
        Row(number=3, text="c", state="running", going=Going(elapsed_s=20), seconds=20),
    ]
    board = Board(rows=rows, total=5, done_s=[60.0])
    assert board.waiting == 2
    assert board.summary == "2 of 5 jobs done, 1 failed, 1 running, about 3 min left"
    assert [board.eta(row) for row in rows] == ["", "", "40 s"]
    over = Board(rows=rows[:2], total=2, done_s=[60.0])
    assert over.summary == "2 of 2 jobs done, 1 failed"


def test_jobs_are_called_by_what_is_their_own() -> None:
    assert own_texts([["experiment=a", "++seed=0"], ["experiment=a", "++seed=1"]]) == [
        "seed=0",
        "seed=1",
    ]
    assert own_texts([["experiment=a", "seed=0"]]) == ["experiment=a seed=0"]
    assert own_texts([["a=1"], ["a=1"]]) == ["a=1", "a=1"]
