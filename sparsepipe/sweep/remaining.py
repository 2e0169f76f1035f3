"""How far a job is and how long a sweep will still take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """A job that runs.

    Args:
        elapsed_s: since it began.
        share: of it that is done, from 0 to 1; None where nobody knows.
        share_before: that was done when it began.
    """

    elapsed_s: float
    share: float | None = None
    share_before: float = 0.0


def left_s(job: Going, typical_s: float | None) -> float | None:
    """How long a job will still take: at its own pace, else as long as others did."""
    if job.share is not None and job.share > job.share_before:
        return job.elapsed_s * (1 - job.share) / (job.share - job.share_before)
    return None if typical_s is None else max(0.0, typical_s - job.elapsed_s)


def sweep_left_s(done_s: Sequence[float], going: Sequence[Going], *, waiting: int) -> float | None:
    """How long a sweep will still take; None where there is nothing to tell it by.

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
    """Such as ``45 s``, ``12 min`` and ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 120 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
