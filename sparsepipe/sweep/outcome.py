"""The outcome of a job, by its own record and by how its process ended. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.sweep.record import JobRecord, Status

EndedBy = Literal["limit", "stop", "lingering"]
_LESS_MEMORY = (
    "let jobs need less memory (data.batch_size), or run fewer at a time (hydra.launcher.max_jobs)"
)
_REMEDY = "\n  remedy: "
_UNKILLABLE = (
    "the kernel holds what is left, most often for a GPU's driver or a network file system that "
    "hangs: see dmesg, and restart the machine where nothing else helps"
)
_GO_ON = "given again, the sweep goes on with this run from its last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the processes of a job ended; those of ``left`` still run although they were killed."""

    exit_code: int
    ended_by: EndedBy | None = None
    limit_s: float | None = None
    oom_kills: int | None = None
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Status, error and exit code of a job."""

    status: Status
    error: str | None = None
    exit_code: int = 0


def outcome(record: JobRecord | None, end: End) -> Outcome:
    """The outcome of a job, by its own record if there is one and by the end of its processes."""
    found = _outcome(record, end)
    if found.status == "finished" or not end.left:
        return found
    cause, _, remedy = (found.error or "it failed").partition(_REMEDY)
    remedies = _UNKILLABLE + (f"; {remedy}" if remedy else "")
    return dataclasses.replace(found, error=f"{cause}; {left_text(end.left)}{_REMEDY}{remedies}")


def left_text(left: Sequence[int]) -> str:
    """Names processes that still run though they were killed."""
    which = "processes" if len(left) > 1 else "process"
    return f"{which} {', '.join(map(str, left))} cannot be ended"


def with_outcome(record: JobRecord, end: End, *, log: str) -> JobRecord:
    """A job's own record, corrected by how its processes ended."""
    found = outcome(record, end)
    return dataclasses.replace(
        record, status=found.status, error=found.error, exit_code=found.exit_code, log=log
    )


def _outcome(record: JobRecord | None, end: End) -> Outcome:
    if record is not None and record.status == "finished":
        return Outcome(status="finished")
    if record is not None and record.status == "failed":
        error = _and_ended(_with_memory(record.error, end), end)
        return Outcome(status="failed", error=error, exit_code=record.exit_code or 1)
    if end.ended_by == "stop":
        code = record.exit_code if record is not None and record.status == "stopped" else 1
        return Outcome(status="stopped", error="ended with the sweep", exit_code=code)
    if end.ended_by == "limit":
        return Outcome(status="failed", error=_over_limit(end), exit_code=1)
    if record is None:
        code = 128 - end.exit_code if end.exit_code < 0 else end.exit_code or 1
        return Outcome(status="failed", error=_without_record(end), exit_code=code)
    return Outcome(status=record.status, error=record.error, exit_code=record.exit_code or 1)


def _over_limit(end: End) -> str:
    return (
        f"it hung or was too slow: ended by hydra.launcher.job_limit_s={end.limit_s:g}"
        f"\n  remedy: see its log, or raise that limit; {_GO_ON}"
    )


def _without_record(end: End) -> str:
    if end.exit_code == -signal.SIGKILL:
        return _killed(end.oom_kills)
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"its process was killed by {name}\n  remedy: see its log; {_GO_ON}"
    return (
        f"its process ended with exit code {end.exit_code} and left no record"
        f"\n  remedy: see its log; {_GO_ON}"
    )


def _killed(oom_kills: int | None) -> str:
    if oom_kills:
        how = "killed by the OOM killer: the machine (or the container) ran out of memory"
    else:
        counted = " (which has counted none here)" if oom_kills == 0 else ""
        how = (
            "its process was killed by SIGKILL, which this sweep did not send; most often that is "
            f"the OOM killer{counted}, when memory runs out"
        )
    return f"{how}\n  remedy: {_LESS_MEMORY}; {_GO_ON}"


def _and_ended(error: str | None, end: End) -> str | None:
    """The error of a job that failed by itself and then had to be ended."""
    if end.ended_by is None:
        return error
    by = {
        "limit": f"by hydra.launcher.job_limit_s={end.limit_s or 0:g}",
        "stop": "with the sweep",
        "lingering": "by force, a while after that",
    }[end.ended_by]
    cause, line, remedy = (error or "it failed").partition(_REMEDY)
    return f"{cause}; and it had to be ended {by}{line}{remedy}"


def _with_memory(error: str | None, end: End) -> str | None:
    """The error of a job of several processes, one of which the OOM killer ended."""
    if error is None or not end.oom_kills or "SIGKILL" not in error:
        return error
    cause, _, remedy = error.partition(_REMEDY)
    return (
        f"{cause}; that was the OOM killer: the machine (or the container) ran out of memory"
        f"\n  remedy: {_LESS_MEMORY}" + (f"; {remedy}" if remedy else "")
    )
