"""The state of a running sweep for display: its jobs and the remaining time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """Progress of a running job; ``share`` is done, from 0 to 1, and None where unknown."""

    elapsed_s: float
    share: float | None = None
    share_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job, numbered from 1. ``state`` is ``running``, ``before`` (the run was finished before) or
    the record's status; ``detail`` is the last line of its log, or the error.
    """

    number: int
    text: str
    state: str
    going: Going | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A snapshot of a sweep. ``done_s`` are durations of jobs that this sweep has finished."""

    rows: Sequence[Row]
    total: int
    done_s: Sequence[float]

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row.going is not None]

    @property
    def ended(self) -> list[Row]:
        return [row for row in self.rows if row.going is None]

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self.total - len(self.rows)

    @property
    def left_s(self) -> float | None:
        """How long the sweep will still take; None where that is unknown."""
        going = [row.going for row in self.running if row.going is not None]
        return sweep_left_s(self.done_s, going, waiting=self.waiting)

    @property
    def summary(self) -> str:
        failed = sum(row.state == "failed" for row in self.ended)
        parts = [f"{len(self.ended)} of {self.total} jobs done"]
        if failed:
            parts.append(f"{failed} failed")
        if self.running:
            parts.append(f"{len(self.running)} running")
        if self.left_s is not None and (self.running or self.waiting):
            parts.append(f"about {duration_text(self.left_s)} left")
        return ", ".join(parts)

    def eta(self, row: Row) -> str:
        """How long a job will still take, as text; empty where that is unknown."""
        typical_s = sum(self.done_s) / len(self.done_s) if self.done_s else None
        if row.going is None or (left := left_s(row.going, typical_s)) is None:
            return ""
        return duration_text(left)


def left_s(job: Going, typical_s: float | None) -> float | None:
    """How long a job will still take: at its own pace, else as long as others did."""
    if job.share is not None and job.share > job.share_before:
        return job.elapsed_s * (1 - job.share) / (job.share - job.share_before)
    return None if typical_s is None else max(0.0, typical_s - job.elapsed_s)


def sweep_left_s(done_s: Sequence[float], going: Sequence[Going], *, waiting: int) -> float | None:
    """How long a sweep will still take; None where that is unknown.

    Args:
        done_s: how long finished jobs took, without those that had been finished before.
        going: jobs that run; as many as these go on running at a time.
        waiting: how many have not begun.
    """
    known = [*done_s] or [
        job.elapsed_s + left for job in going if (left := left_s(job, None)) is not None
    ]
    typical_s = sum(known) / len(known) if known else None
    rest = [left_s(job, typical_s) for job in going]
    if any(one is None for one in rest) or (waiting and typical_s is None):
        return None
    total_s = sum(one for one in rest if one is not None) + waiting * (typical_s or 0.0)
    longest_s = max((one for one in rest if one is not None), default=0.0)
    return max(longest_s, total_s / max(1, len(going)))


def duration_text(seconds: float) -> str:
    """Text such as ``45 s``, ``12 min`` and ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 120 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def own_texts(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Each job's overrides without those that all jobs share; all of them where nothing differs."""
    shared = set(overrides[0]).intersection(*overrides[1:]) if len(overrides) > 1 else set()
    return [
        " ".join(item.lstrip("+") for item in job if item not in shared)
        or " ".join(item.lstrip("+") for item in job)
        for job in overrides
    ]
