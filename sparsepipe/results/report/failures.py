"""Jobs of a sweep that have left no figures, in its report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that did not finish.

    Attributes:
        job: which, as the command line has it.
        error: why, with a remedy.
    """

    job: str
    error: str
