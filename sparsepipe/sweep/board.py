"""What a person is to see of a sweep that runs: plain values, for whoever shows them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.sweep.remaining import Going, duration_text, left_s, sweep_left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job that runs or has ended.

    Args:
        number: from 1, as people count.
        text: what it is, in its own overrides.
        state: ``running``, ``prepares`` (its data), ``waits`` (for another process), or its
            record's status.
        going: how far it is, where it runs.
        detail: what it says last, or why it failed.
        seconds: since it began, or how long it took.
    """

    number: int
    text: str
    state: str
    going: Going | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A sweep at a moment.

    Args:
        rows: jobs that run, and those that have ended.
        total: how many jobs there are.
        done_s: how long finished jobs took, without those that had been finished before.
    """

    rows: Sequence[Row]
    total: int
    done_s: Sequence[float]

    @property
    def running(self) -> list[Row]:
        """Jobs that run."""
        return [row for row in self.rows if row.going is not None]

    @property
    def ended(self) -> list[Row]:
        """Jobs that have ended."""
        return [row for row in self.rows if row.going is None]

    @property
    def waiting(self) -> int:
        """How many have not begun."""
        return self.total - len(self.rows)

    @property
    def left_s(self) -> float | None:
        """How long it will still take; None where nobody can tell."""
        going = [row.going for row in self.running if row.going is not None]
        return sweep_left_s(self.done_s, going, waiting=self.waiting)

    @property
    def summary(self) -> str:
        """In a line."""
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
        """How long a job will still take, in words; empty where nobody can tell."""
        typical_s = sum(self.done_s) / len(self.done_s) if self.done_s else None
        if row.going is None or (left := left_s(row.going, typical_s)) is None:
            return ""
        return duration_text(left)


def own_texts(overrides: Sequence[Sequence[str]]) -> list[str]:
    """What each job is, without what is the same in all; all of it where nothing differs."""
    shared = set(overrides[0]).intersection(*overrides[1:]) if len(overrides) > 1 else set()
    return [
        " ".join(item.lstrip("+") for item in job if item not in shared)
        or " ".join(item.lstrip("+") for item in job)
        for job in overrides
    ]
