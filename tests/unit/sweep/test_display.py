"""The display of a running sweep: the time that is left, a summary, the table and lines."""

from __future__ import annotations

import io
import logging
import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from rich.console import Console

from sparsepipe.sweep.display import (
    JobRow,
    Lines,
    LiveView,
    SafeDisplay,
    SweepState,
    picture,
)
from sparsepipe.sweep.record import own_texts
from sparsepipe.utils.progress import Silence

ROWS = [
    JobRow(number=1, text="seed=0", state="failed", detail="wrong [red]key[/red]", seconds=3),
    JobRow(number=2, text="seed=1", state="before"),
    JobRow(number=3, text="seed=2", state="finished", seconds=60),
    JobRow(
        number=4, text="seed=3", state="running", seconds=30, detail="epoch 1/4 train/loss=0.7",
        share=0.25,
    ),
]  # fmt: skip
STATE = SweepState(rows=ROWS, total=6)


def drawn(state: SweepState, *, room: int, width: int = 110) -> list[str]:
    stream = io.StringIO()
    shown = picture(state, room=room, width=width)
    Console(file=stream, width=width, force_terminal=False).print(shown)
    return stream.getvalue().splitlines()


def test_the_table() -> None:
    head, *jobs, summary = drawn(STATE, room=9)
    assert head.split() == ["job", "state", "time", "progress"]
    assert [line.split()[:4] for line in jobs] == [
        ["1", "seed=0", "failed", "3"],
        ["2", "seed=1", "before", "0"],
        ["3", "seed=2", "finished", "60"],
        ["4", "seed=3", "running", "30"],
    ]
    assert "wrong [red]key[/red]" in jobs[0], "what a job says is no mark-up"
    assert "epoch 1/4" in jobs[3]
    assert summary.strip().startswith("2 of 6 jobs done, 1 failed, 1 running")


def test_what_runs_counts_where_room_is_short() -> None:
    running = [JobRow(number=n, text=f"seed={n}", state="running") for n in range(10, 20)]
    lines = drawn(SweepState(rows=[*ROWS[:3], *running[:2]], total=30), room=3)
    assert [line.split()[0] for line in lines[1:-1]] == ["3", "10", "11"]
    lines = drawn(SweepState(rows=[*ROWS[:3], *running], total=30), room=3)
    assert [line.split()[0] for line in lines[1:-1]] == ["10", "11", "12"]
    assert "10 running" in lines[-1]


def test_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    now_s = [0.0]
    lines = Lines(Silence(clock=lambda: now_s[0]))
    with caplog.at_level(logging.INFO):
        lines.began(ROWS[3], lambda: STATE)
        for row in ROWS[:3]:
            lines.ended(row, lambda: STATE)
        for now_s[0] in (29.0, 30.0, 31.0):
            lines.show(lambda: STATE)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "job 4: seed=3"
    assert said[1].startswith(
        "job 1 failed after 3 s: wrong [red]key[/red] (2 of 6 jobs done, 1 failed, "
    )
    assert said[2].startswith("job 2 was finished before (")
    assert said[3].startswith("job 3 finished after 60 s (")
    assert said[4] == f"{STATE.summary}\n  job 4 after 30 s: epoch 1/4", "without its figures"
    assert len(said) == 5


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
        live = SafeDisplay()._view
        assert isinstance(live, LiveView)
        with closing(live):
            live.began(ROWS[3], lambda: STATE)
            sys.stdout.write("outputs/tiny/abc\n")  # a run's directory, above the table
            live.ended(ROWS[0], lambda: STATE)
            live.show(lambda: STATE)
        expected, seen = ("2 of 6 jobs done", "outputs/tiny/abc"), ""
        # On a busy machine a terminal hands over what was written piece by piece.
        while not all(text in seen for text in expected) and select.select([ours], [], [], 10)[0]:
            seen += os.read(ours, 100_000).decode(errors="replace")
    assert all(text in seen for text in expected), seen


def test_jobs_are_called_by_what_is_their_own() -> None:
    assert own_texts([["experiment=a", "++seed=0"], ["experiment=a", "++seed=1"]]) == [
        "seed=0",
        "seed=1",
    ]
    assert own_texts([["experiment=a", "seed=0"]]) == ["experiment=a seed=0"]
    assert own_texts([["a=1"], ["a=1"]]) == ["a=1", "a=1"]
    command = ["++a.lr=interval(0,1)", "++model.width=1", "seed=0"]
    assert own_texts([["a.lr=0.5", "model.width=1", "seed=0"]], given=command) == ["a.lr=0.5"]
