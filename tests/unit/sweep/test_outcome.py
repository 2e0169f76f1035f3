"""What has become of a job, by its record and by how its process ended."""

from __future__ import annotations

import signal

import pytest

from sparsepipe.sweep.record import JobEnd, JobRecord, outcome

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
        (told("finished"), JobEnd(exit_code=0), "finished", None, 0),
        # It was done, whatever came then.
        (
            told("finished"),
            JobEnd(exit_code=KILLED, ended_by="limit", limit_s=1),
            "finished",
            None,
            0,
        ),
        (told("failed", "wrong key", 2), JobEnd(exit_code=2), "failed", "wrong key", 2),
        (None, JobEnd(exit_code=KILLED, oom_kills=1), "failed", "killed by the OOM killer: ", 137),
        (None, JobEnd(exit_code=KILLED), "failed", "as the OOM killer does", 137),
        (None, JobEnd(exit_code=KILLED, oom_kills=0), "failed", "as the OOM killer does", 137),
        (None, JobEnd(exit_code=-signal.SIGSEGV, oom_kills=1), "failed", "killed by SIGSEGV", 139),
        (None, JobEnd(exit_code=3), "failed", "exit code 3 and left no record", 3),
        (None, JobEnd(exit_code=0), "failed", "exit code 0 and left no record", 1),
        (
            told("failed", RANK, 1),
            JobEnd(exit_code=1, oom_kills=2),
            "failed",
            "rank 1 was killed by SIGKILL; the other ranks were ended; killed by the OOM killer",
            1,
        ),
        (told("failed", RANK, 1), JobEnd(exit_code=1, oom_kills=0), "failed", RANK, 1),
        (
            None,
            JobEnd(exit_code=KILLED, ended_by="limit", limit_s=2.5, oom_kills=0),
            "failed",
            "it hung or was too slow: ended by hydra.launcher.job_limit_s=2.5",
            1,
        ),
        (
            told("stopped", "stopped by SIGTERM", 143),
            JobEnd(exit_code=143, ended_by="limit", limit_s=60.0),
            "failed",
            "job_limit_s=60\n",
            1,
        ),
        # What it failed by counts, though it was ended while it left.
        (
            told("failed", "wrong key\n  remedy: mend it", 2),
            JobEnd(exit_code=KILLED, ended_by="limit", limit_s=60.0),
            "failed",
            "wrong key; and its processes had to be ended\n  remedy: mend it",
            2,
        ),
        (
            told("failed", "no space left\n  remedy: mend it", 1),
            JobEnd(exit_code=KILLED, ended_by="stop"),
            "failed",
            "no space left; and its processes had to be ended\n  remedy: mend it",
            1,
        ),
        (
            told("failed", RANK, 1),
            JobEnd(exit_code=KILLED, ended_by="stop", oom_kills=1),
            "failed",
            "killed by the OOM killer: the machine (or the container) ran out of memory; and its",
            1,
        ),
        (
            told("failed", "wrong key", 2),
            JobEnd(exit_code=KILLED, ended_by="lingering"),
            "failed",
            "wrong key; and its processes had to be ended",
            2,
        ),
        (told("finished"), JobEnd(exit_code=KILLED, ended_by="lingering"), "finished", None, 0),
        # Of which something is left that nothing ends.
        (told("finished"), JobEnd(exit_code=KILLED, left=(7,)), "finished", None, 0),
        (
            None,
            JobEnd(exit_code=KILLED, ended_by="limit", limit_s=60.0, left=(7, 9)),
            "failed",
            "job_limit_s=60; processes 7, 9 cannot be ended\n  remedy: see its log",
            1,
        ),
        (
            told("failed", "no space left\n  remedy: mend it", 3),
            JobEnd(exit_code=3, left=(7,)),
            "failed",
            "mend it; see dmesg",
            3,
        ),
        (
            None,
            JobEnd(exit_code=KILLED, ended_by="stop", left=(7,)),
            "stopped",
            "ended with the sweep; process 7 cannot be ended",
            1,
        ),
        (
            told("stopped", "s", 143),
            JobEnd(exit_code=KILLED, ended_by="lingering"),
            "stopped",
            "s",
            143,
        ),
        (
            told("stopped", "s", 130),
            JobEnd(exit_code=130, ended_by="stop"),
            "stopped",
            "ended",
            130,
        ),
        (None, JobEnd(exit_code=KILLED, ended_by="stop"), "stopped", "ended with the sweep", 1),
        # Somebody else's SIGTERM.
        (
            told("stopped", "stopped by SIGTERM", 143),
            JobEnd(exit_code=143),
            "stopped",
            "SIGTERM",
            143,
        ),
    ],
)
def test_outcomes(
    record: JobRecord | None, end: JobEnd, status: str, words: str | None, exit_code: int
) -> None:
    found, error, code = outcome(record, end)
    assert (found, code) == (status, exit_code)
    assert (words is None) == (error is None)
    assert words is None or words in error
    if status == "failed" and "wrong key" not in str(words):
        assert "\n  remedy: " in error
