"""What has come of a job, by what it has told and how it ended. Nothing is read or written here."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsepipe.sweep.record import JobRecord, Status

EndedBy = Literal["limit", "wait", "stop", "leaving"]
_LESS_MEMORY = "let jobs need less memory (data.batch_size), or run fewer at a time "
_LESS_MEMORY += "(hydra.launcher.max_jobs)"
_REMEDY = "\n  remedy: "
_HELD = "the kernel holds what is left, most often for a GPU's driver or a network file system "
_HELD += "that hangs: see dmesg, and restart the machine where nothing else helps"
_GO_ON = "given again, the sweep goes on with this run from its last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the process of a job ended.

    Args:
        exit_code: its exit status; negative for a signal.
        ended_by: why the sweep ended it; None where it did not.
        limit_s: the limit by which it did.
        oom_kills: processes that the kernel ended for want of memory meanwhile; None: unknown.
        left: processes that were killed and are there all the same.
    """

    exit_code: int
    ended_by: EndedBy | None = None
    limit_s: float | None = None
    oom_kills: int | None = None
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What has come of a job that left no word, or not the last one."""

    status: Status
    error: str | None = None
    exit_code: int = 0


def verdict(told: JobRecord | None, end: End) -> Verdict:
    """What has come of a job.

    Args:
        told: what it says itself.
        end: how its process ended.
    """
    found = _verdict(told, end)
    if found.status == "finished" or not end.left:
        return found
    said, _, remedy = (found.error or "it failed").partition(_REMEDY)
    remedies = _HELD + (f"; {remedy}" if remedy else "")
    told_left = f"{said}; {left_text(end.left)}{_REMEDY}{remedies}"
    return dataclasses.replace(found, error=told_left)


def left_text(left: Sequence[int]) -> str:
    """Of processes that are there though they were killed."""
    which = "processes" if len(left) > 1 else "process"
    return f"{which} {', '.join(map(str, left))} cannot be ended"


def _verdict(told: JobRecord | None, end: End) -> Verdict:
    if told is not None and told.status == "finished":
        return Verdict(status="finished")
    if told is not None and told.status == "failed":
        said = _with_memory(told.error, end)
        return Verdict(status="failed", error=_and_ended(said, end), exit_code=told.exit_code or 1)
    if end.ended_by == "stop":
        code = told.exit_code if told is not None and told.status == "stopped" else 1
        return Verdict(status="stopped", error="ended with the sweep", exit_code=code)
    if end.ended_by in ("limit", "wait"):
        return Verdict(status="failed", error=_over_limit(end), exit_code=1)
    if told is None:
        return Verdict(status="failed", error=_silent(end), exit_code=_code(end.exit_code))
    return Verdict(status=told.status, error=told.error, exit_code=told.exit_code or 1)


def judged(told: JobRecord, end: End, *, log: str) -> JobRecord:
    """A job's own record with the sweep's view of its end."""
    found = verdict(told, end)
    return dataclasses.replace(
        told, status=found.status, error=found.error, exit_code=found.exit_code, log=log
    )


def _code(exit_code: int) -> int:
    return 128 - exit_code if exit_code < 0 else exit_code or 1


def _over_limit(end: End) -> str:
    if end.ended_by == "limit":
        return (
            f"it hung or was too slow: ended by hydra.launcher.job_limit_s={end.limit_s:g}"
            f"\n  remedy: see its log, or raise that limit; {_GO_ON}"
        )
    return (
        "it waited for another process, which does the same, for longer than "
        f"hydra.launcher.wait_limit_s={end.limit_s:g}\n  remedy: wait for that process or end it "
        "(the job's log names the run) and give the command again, or raise that limit"
    )


def _silent(end: End) -> str:
    """Of a process that left no word."""
    if end.exit_code == -signal.SIGKILL:
        return _killed(end.oom_kills)
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"its process was killed by {name}\n  remedy: see its log; {_GO_ON}"
    return (
        f"its process ended with exit code {end.exit_code} and no word of why"
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
    """Of a job that has told its error, and did not end by itself."""
    if end.ended_by is None:
        return error
    limit_s = end.limit_s or 0
    by = {
        "limit": f"by hydra.launcher.job_limit_s={limit_s:g}",
        "wait": f"by hydra.launcher.wait_limit_s={limit_s:g}",
        "stop": "with the sweep",
        "leaving": "by force, a while after that",
    }[end.ended_by]
    said, line, remedy = (error or "it failed").partition(_REMEDY)
    return f"{said}; and it had to be ended {by}{line}{remedy}"


def _with_memory(error: str | None, end: End) -> str | None:
    """Of a job of several processes, one of which the OOM killer took."""
    if error is None or not end.oom_kills or "SIGKILL" not in error:
        return error
    said, _, remedy = error.partition(_REMEDY)
    return (
        f"{said}; that was the OOM killer: the machine (or the container) ran out of memory"
        f"\n  remedy: {_LESS_MEMORY}" + (f"; {remedy}" if remedy else "")
    )
