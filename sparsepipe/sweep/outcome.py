"""The outcome of a job, by its own record and by how its processes ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.sweep.record import JobRecord, Status

EndedBy = Literal["limit", "stop", "lingering"]
_REMEDY = "\n  remedy: "
_OUT_OF_MEMORY = "killed by the OOM killer: the machine (or the container) ran out of memory"
_LESS_MEMORY = (
    "let jobs need less memory (data.batch_size), or run fewer at a time (hydra.launcher.max_jobs)"
)
_GO_ON = "given again, the sweep goes on with this run from its last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How the processes of a job ended.

    Args:
        exit_code: exit code of the first one.
        ended_by: what ended them, where they did not end by themselves.
        limit_s: the job's limit in seconds, where that has ended them.
        oom_kills: processes of the machine that the OOM killer has ended since; None: unknown.
        left: processes that still run although they were killed.
    """

    exit_code: int
    ended_by: EndedBy | None = None
    limit_s: float | None = None
    oom_kills: int | None = None
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Status, error and exit code of a job."""

    status: Status
    error: str | None = None
    exit_code: int = 0


def outcome(record: JobRecord | None, end: JobEnd) -> JobOutcome:
    """The outcome of a job, by its own record if it left one and by the end of its processes."""
    if record is not None and record.status == "finished":
        return JobOutcome(status="finished")
    status: Status = "failed"
    code = 1 if record is None else record.exit_code or 1
    remedies = [f"see its log; {_GO_ON}"]
    if record is not None and record.status == "failed":
        cause, _, remedy = (record.error or "it failed").partition(_REMEDY)
        remedies = [remedy] if remedy else []
        if end.oom_kills and "SIGKILL" in cause:
            cause, remedies = f"{cause}; {_OUT_OF_MEMORY}", [_LESS_MEMORY, *remedies]
        if end.ended_by is not None:
            cause += "; and its processes had to be ended"
    elif end.ended_by == "stop":
        status, cause, remedies = "stopped", "ended with the sweep", []
    elif end.ended_by == "limit":
        cause = f"it hung or was too slow: ended by hydra.launcher.job_limit_s={end.limit_s:g}"
        code = 1
    elif record is not None:
        status, (cause, _, remedy) = record.status, (record.error or "").partition(_REMEDY)
        remedies = [remedy] if remedy else []
    elif end.exit_code == -signal.SIGKILL:
        code, remedies = 128 + signal.SIGKILL, [_LESS_MEMORY, _GO_ON]
        killed = "its process was killed by SIGKILL, as the OOM killer does when memory runs out"
        cause = _OUT_OF_MEMORY if end.oom_kills else killed
    elif end.exit_code < 0:
        code = 128 - end.exit_code
        cause = f"its process was killed by {signal.Signals(-end.exit_code).name}"
    else:
        code = end.exit_code or 1
        cause = f"its process ended with exit code {end.exit_code} and left no record"
    if end.left:
        cause, remedies = f"{cause}; {left_text(end.left)}", [*remedies, "see dmesg"]
    error = cause + (_REMEDY + "; ".join(remedies) if remedies else "")
    return JobOutcome(status=status, error=error, exit_code=code)


def left_text(left: Sequence[int]) -> str:
    """Names processes that still run though they were killed."""
    which = "processes" if len(left) > 1 else "process"
    return f"{which} {', '.join(map(str, left))} cannot be ended"
