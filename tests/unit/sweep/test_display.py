"""What a person sees of a sweep that runs."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from sparsepipe.sweep.board import Board, Going, Row
from sparsepipe.sweep.display import Lines, LiveView, picture, view

ROWS = [
    Row(number=1, text="seed=0", state="failed", detail="wrong [red]key[/red]", seconds=3),
    Row(number=2, text="seed=1", state="before"),
    Row(number=3, text="seed=2", state="finished", seconds=60),
    Row(
        number=4, text="seed=3", state="running", seconds=30, detail="epoch 1/4 train/loss=0.7",
        going=Going(elapsed_s=30, share=0.25),
    ),
]  # fmt: skip
BOARD = Board(rows=ROWS, total=6, done_s=[60.0])


def drawn(board: Board, *, room: int, width: int = 110) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(picture(board, room=room))
    return stream.getvalue().splitlines()


def test_the_table() -> None:
    head, *jobs, summary = drawn(BOARD, room=9)
    assert head.split() == ["job", "state", "time", "progress", "left"]
    assert [line.split()[:4] for line in jobs] == [
        ["1", "seed=0", "failed", "3"],
        ["2", "seed=1", "before", "0"],
        ["3", "seed=2", "finished", "60"],
        ["4", "seed=3", "running", "30"],
    ]
    assert "wrong [red]key[/red]" in jobs[0], "what a job says is no mark-up"
    assert "90 s" in jobs[3], "three quarters are left"
    assert "epoch 1/4" in jobs[3]
    assert summary.strip().startswith("3 of 6 jobs done, 1 failed, 1 running, about")


def test_what_runs_counts_where_room_is_short() -> None:
    running = [
        Row(number=n, text=f"seed={n}", state="running", going=Going(elapsed_s=1))
        for n in range(10, 20)
    ]
    lines = drawn(Board(rows=[*ROWS[:3], *running[:2]], total=30, done_s=[]), room=3)
    assert [line.split()[0] for line in lines[1:-1]] == ["3", "10", "11"]
    lines = drawn(Board(rows=[*ROWS[:3], *running], total=30, done_s=[]), room=3)
    assert [line.split()[0] for line in lines[1:-1]] == ["10", "11", "12"]
    assert "10 running" in lines[-1]


def test_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    with caplog.at_level(logging.INFO), Lines() as lines:
        lines.began(ROWS[3], lambda: BOARD)
        for row in ROWS[:3]:
            lines.ended(row, lambda: BOARD)
        lines.show(lambda: BOARD)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "job 4: seed=3"
    assert said[1].startswith("job 1 failed after 3 s: wrong [red]key[/red] (3 of 6 jobs done, ")
    assert said[2].startswith("job 2 was finished before (")
    assert said[3].startswith("job 3 finished after 60 s (")
    assert len(said) == 4


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Both streams of this process in a terminal; what reads the other end of it."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        yield ours
    os.close(ours)


def test_a_terminal_gets_a_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as ours:
        live = view()
        assert isinstance(live, LiveView)
        with live:
            live.began(ROWS[3], lambda: BOARD)
            sys.stdout.write("outputs/tiny/abc\n")  # a run's directory, above the table
            live.ended(ROWS[0], lambda: BOARD)
            live.show(lambda: BOARD)
        seen = os.read(ours, 100_000).decode()
    assert "3 of 6 jobs done" in seen
    assert "outputs/tiny/abc" in seen


def test_elsewhere_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        assert isinstance(view(), Lines)
