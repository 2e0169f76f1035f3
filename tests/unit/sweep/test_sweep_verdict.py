"""What is said of a job by how its process ended, and of the time that is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sparsepipe.runs.oom import counters, kills_in, kills_since, oom_kills
from sparsepipe.sweep.board import Board, Going, Row, duration_text, left_s, own_texts, sweep_left_s
from sparsepipe.sweep.outcome import End, outcome
from sparsepipe.sweep.record import JobRecord

KILLED = -signal.SIGKILL


def told(status: str, error: str | None = None, exit_code: int = 0) -> JobRecord:
    run = "run" if status == "finished" else None
    return JobRecord(
        number=0, overrides=(), status=status, run=run,
        error=error, exit_code=exit_code, began_s=0.0, ended_s=1.0,
    )  # fmt: skip


RANK = "rank 1 was killed by SIGKILL; the other ranks were ended\n  remedy: see whether"


@pytest.mark.parametrize(
    ("record", "end", "status", "words", "exit_code"),
    [
        (told("finished"), End(exit_code=0), "finished", None, 0),
        # It was done, whatever came then.
        (told("finished"), End(exit_code=KILLED, ended_by="limit", limit_s=1), "finished", None, 0),
        (told("failed", "wrong key", 2), End(exit_code=2), "failed", "wrong key", 2),
        (None, End(exit_code=KILLED, oom_kills=1), "failed", "killed by the OOM killer: ", 137),
        (None, End(exit_code=KILLED), "failed", "most often that is the OOM killer, when", 137),
        (None, End(exit_code=KILLED, oom_kills=0), "failed", "(which has counted none here)", 137),
        (None, End(exit_code=-signal.SIGSEGV, oom_kills=1), "failed", "killed by SIGSEGV", 139),
        (None, End(exit_code=3), "failed", "exit code 3 and left no record", 3),
        (None, End(exit_code=0), "failed", "exit code 0 and left no record", 1),
        (
            told("failed", RANK, 1),
            End(exit_code=1, oom_kills=2),
            "failed",
            "rank 1 was killed by SIGKILL; the other ranks were ended; that was the OOM killer",
            1,
        ),
        (told("failed", RANK, 1), End(exit_code=1, oom_kills=0), "failed", RANK, 1),
        (
            None,
            End(exit_code=KILLED, ended_by="limit", limit_s=2.5, oom_kills=0),
            "failed",
            "it hung or was too slow: ended by hydra.launcher.job_limit_s=2.5",
            1,
        ),
        (
            told("stopped", "stopped by SIGTERM", 143),
            End(exit_code=143, ended_by="limit", limit_s=60.0),
            "failed",
            "job_limit_s=60\n",
            1,
        ),
        # What it failed by counts, though it was ended while it left.
        (
            told("failed", "wrong key\n  remedy: mend it", 2),
            End(exit_code=KILLED, ended_by="limit", limit_s=60.0),
            "failed",
            "wrong key; and it had to be ended by hydra.launcher.job_limit_s=60\n  remedy: mend it",
            2,
        ),
        (
            told("failed", "no space left\n  remedy: mend it", 1),
            End(exit_code=KILLED, ended_by="stop"),
            "failed",
            "no space left; and it had to be ended with the sweep\n  remedy: mend it",
            1,
        ),
        (
            told("failed", RANK, 1),
            End(exit_code=KILLED, ended_by="stop", oom_kills=1),
            "failed",
            "that was the OOM killer: the machine (or the container) ran out of memory; and it",
            1,
        ),
        (
            told("failed", "wrong key", 2),
            End(exit_code=KILLED, ended_by="lingering"),
            "failed",
            "wrong key; and it had to be ended by force, a while after that",
            2,
        ),
        (told("finished"), End(exit_code=KILLED, ended_by="lingering"), "finished", None, 0),
        # Of which something is left that nothing ends.
        (told("finished"), End(exit_code=KILLED, left=(7,)), "finished", None, 0),
        (
            None,
            End(exit_code=KILLED, ended_by="limit", limit_s=60.0, left=(7, 9)),
            "failed",
            "job_limit_s=60; processes 7, 9 cannot be ended\n  remedy: the kernel holds",
            1,
        ),
        (
            told("failed", "no space left\n  remedy: mend it", 3),
            End(exit_code=3, left=(7,)),
            "failed",
            "nothing else helps; mend it",
            3,
        ),
        (
            None,
            End(exit_code=KILLED, ended_by="stop", left=(7,)),
            "stopped",
            "ended with the sweep; process 7 cannot be ended",
            1,
        ),
        (
            told("stopped", "s", 143),
            End(exit_code=KILLED, ended_by="lingering"),
            "stopped",
            "s",
            143,
        ),
        (told("stopped", "s", 130), End(exit_code=130, ended_by="stop"), "stopped", "ended", 130),
        (None, End(exit_code=KILLED, ended_by="stop"), "stopped", "ended with the sweep", 1),
        # Somebody else's SIGTERM.
        (told("stopped", "stopped by SIGTERM", 143), End(exit_code=143), "stopped", "SIGTERM", 143),
    ],
)
def test_outcomes(
    record: JobRecord | None, end: End, status: str, words: str | None, exit_code: int
) -> None:
    found = outcome(record, end)
    assert (found.status, found.exit_code) == (status, exit_code)
    assert (words is None) == (found.error is None)
    assert words is None or words in found.error
    if status == "failed" and "wrong key" not in str(words):
        assert "\n  remedy: " in found.error


def test_where_the_kernel_counts() -> None:
    v1 = "9:name=systemd:/\n4:memory:/box/a\n1:cpu:/\n"
    assert counters(v1) == [
        Path("/sys/fs/cgroup/memory/box/a/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/box/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    v2 = "0::/user.slice/job:1\n"
    assert counters(v2) == [
        Path("/sys/fs/cgroup/user.slice/job:1/memory.events"),
        Path("/sys/fs/cgroup/user.slice/memory.events"),
        Path("/sys/fs/cgroup/memory.events"),
    ]
    assert counters("0::/\n") == [Path("/sys/fs/cgroup/memory.events")]


def test_what_it_counts() -> None:
    assert kills_in("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n") == 2
    assert kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n") == 5
    assert kills_in("oom_kill_disable 0\nunder_oom 0\n") is None
    here = oom_kills()
    assert here is None or here >= 0
    assert kills_since(None) is None
    assert kills_since(0) == here


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
