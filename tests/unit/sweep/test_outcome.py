"""What has become of a job, by its record and by how its process ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from sparsepipe.sweep.record import JobEnd, JobRecord, outcome

KILLED = -signal.SIGKILL
RANK = "rank 1 was killed by SIGKILL; the other ranks were ended\n  remedy: check whether"
FULL = "no space left\n  remedy: mend it"
LIMIT = {"exit_code": KILLED, "ended_by": "limit", "limit_s": 60.0}
STOP = {"exit_code": KILLED, "ended_by": "stop"}
LINGERS = {"exit_code": KILLED, "ended_by": "lingering"}
OOM = "killed by the OOM killer: the machine (or the container) ran out of memory"
ENDED = "and its processes had to be ended"
ONE_LEFT = "process 7 is still running although it was killed"
TWO_LEFT = "processes 7, 9 are still running although they were killed"


@pytest.mark.parametrize(
    ("record", "end", "status", "words", "exit_code"),
    [
        (("finished", None, 0), {"exit_code": 0}, "finished", None, 0),
        (("failed", "wrong key", 2), {"exit_code": 2}, "failed", "wrong key", 2),
        (None, {"exit_code": KILLED, "oom_kills": 1}, "failed", OOM, 137),
        (None, {"exit_code": KILLED}, "failed", "as the OOM killer does", 137),
        (None, {"exit_code": -signal.SIGSEGV, "oom_kills": 1}, "failed", "by SIGSEGV", 139),
        (None, {"exit_code": 3}, "failed", "exit code 3 and left no record", 3),
        (None, {"exit_code": 0}, "failed", "exit code 0 and left no record", 1),
        (("failed", RANK, 1), {"exit_code": 1, "oom_kills": 2}, "failed", f"ended; {OOM}", 1),
        (("failed", RANK, 1), {"exit_code": 1, "oom_kills": 0}, "failed", RANK, 1),
        (None, LIMIT, "failed", "it hung or was too slow: ended by hydra.launcher.job_limit_s", 1),
        (("stopped", "stopped by SIGTERM", 143), LIMIT, "failed", "job_limit_s=60\n", 1),
        # What it failed by counts, and what it had done, though it was ended while it left.
        (("finished", None, 0), LIMIT, "finished", None, 0),
        (("failed", FULL, 2), LIMIT, "failed", f"left; {ENDED}\n  remedy: mend it", 2),
        (("failed", FULL, 1), STOP, "failed", f"left; {ENDED}\n  remedy: mend it", 1),
        (("failed", RANK, 1), {**STOP, "oom_kills": 1}, "failed", f"{OOM}; {ENDED}", 1),
        (("failed", "wrong key", 2), LINGERS, "failed", f"wrong key; {ENDED}", 2),
        (("finished", None, 0), LINGERS, "finished", None, 0),
        # Of which something is left that nothing ends.
        (("finished", None, 0), {"exit_code": KILLED, "left": (7,)}, "finished", None, 0),
        (None, {**LIMIT, "left": (7, 9)}, "failed", f"; {TWO_LEFT}\n", 1),
        (("failed", FULL, 3), {"exit_code": 3, "left": (7,)}, "failed", "mend it; see dmesg", 3),
        (None, {**STOP, "left": (7,)}, "stopped", f"sweep; {ONE_LEFT}", 1),
        (("stopped", "s", 143), LINGERS, "stopped", "s", 143),
        (("stopped", "s", 130), {**STOP, "exit_code": 130}, "stopped", "ended", 130),
        (None, STOP, "stopped", "ended with the sweep", 1),
        (("stopped", "by SIGTERM", 143), {"exit_code": 143}, "stopped", "SIGTERM", 143),
    ],
)
def test_outcomes(
    record: tuple[str, str | None, int] | None,
    end: dict[str, Any],
    status: str,
    words: str | None,
    exit_code: int,
) -> None:
    own = None
    if record is not None:
        told = {"status": record[0], "error": record[1], "exit_code": record[2], "run": None}
        own = JobRecord(number=0, overrides=(), began_s=0.0, ended_s=1.0, **told)
    found, error, code = outcome(own, JobEnd(**end))
    assert (found, code) == (status, exit_code)
    assert (words is None) == (error is None)
    assert words is None or words in error
    if status == "failed" and "wrong key" not in str(words):
        assert "\n  remedy: " in error
