"""What a job is about while it runs: it tells so itself, and by that its own time is counted."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sparsepipe.aside import Aside
from sparsepipe.errors import DataError
from sparsepipe.results.files import read_json, write_json
from sparsepipe.sweep.record import SweptJob

log = logging.getLogger(__name__)
_WORKS = "works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a job is about.

    Args:
        since_s: when that began, in seconds since 1970.
        stage: ``works`` (at what is its own), else what :class:`~sparsepipe.aside.Aside` calls it.
        limit_s: how long that may take, where it is not the job's own, and not count.
        aside_s: how much of the job's time was not its own until then.
        run: its run's directory; None until that is known.
        mark: of the job's processes, where our launcher has started these.
    """

    since_s: float
    stage: str = _WORKS
    limit_s: float = math.inf
    aside_s: float = 0.0
    run: str | None = None
    mark: str | None = None

    @property
    def works(self) -> bool:
        """Whether it is at its own work."""
        return self.stage == _WORKS

    def aside_at(self, now_s: float) -> float:
        """How much of the job's time is not its own, in seconds; ``now_s``: since 1970."""
        if self.works:
            return self.aside_s
        return self.aside_s + min(self.limit_s, max(0.0, now_s - self.since_s))


class Telling:
    """Tells what a job is about, by a file; where that cannot be written, the job goes on.

    Args:
        file: which.
        mark: of the job's processes.
    """

    def __init__(self, file: Path, *, mark: str | None = None) -> None:
        self._file, self._now = file, Doing(since_s=time.time(), mark=mark)

    def note_run(self, run: Path) -> None:
        """Tells the run's directory."""
        self._tell(replace(self._now, run=str(run)))

    def hear(self, now: Aside | None) -> None:
        """Tells what begins; None: the job's own work."""
        begins_s = time.time()
        before_s = self._now.aside_at(begins_s)
        found = Doing(since_s=begins_s, aside_s=before_s, run=self._now.run, mark=self._now.mark)
        if now is not None:
            found = replace(found, stage=now.what, limit_s=now.limit_s)
        self._tell(found)

    def _tell(self, now: Doing) -> None:
        self._now = now
        try:
            write_json(self._file, now)  # where inf becomes null
        except DataError as error:
            log.warning("what this job is about is not told: %s", error)


def doing(job: SweptJob) -> Doing | None:
    """As a job has told last; None where it has told nothing, and is at its own work."""
    try:
        told = read_json(job.started)
        limit_s = told["limit_s"]
        return Doing(**{**told, "limit_s": math.inf if limit_s is None else limit_s})
    except (DataError, KeyError, TypeError):
        return None
