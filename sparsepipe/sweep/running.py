"""One job while it runs: its process tree, its limit, and how it is ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsepipe.config.sweep_directory import telling_threads
from sparsepipe.errors import DataError
from sparsepipe.runs.oom import kills_since, oom_kills
from sparsepipe.sweep.finished import untold
from sparsepipe.sweep.needs import whole_machine
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.progress import epochs_found
from sparsepipe.sweep.record import (
    JobRecord,
    SweptJob,
    keep_record,
    read_record,
    record_of,
)
from sparsepipe.sweep.settings import Settings
from sparsepipe.sweep.slots import Demand, Grant, environment
from sparsepipe.sweep.stages import Doing, doing
from sparsepipe.sweep.verdict import End, EndedBy, judged, verdict

log = logging.getLogger(__name__)
_LEAVING_S = 5.0
"""How long what a job has started may take to end after it."""
_TOLD_S = 60.0
"""How long the process of a job may take to end after it has left its record."""
_KILL_AGAIN_S = 1.0
ENDING_S = 60.0
"""How long after a first kill processes are looked for: what is left then cannot be ended."""
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyJob:
    """A job that can be started.

    Args:
        job: which.
        config: resolved and checked.
        demand: what it takes of the machine.
        env: variables that the user sets for jobs (``hydra.job.env_set``).
    """

    job: SweptJob
    config: Mapping[str, Any]
    demand: Demand
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def grace_s(self) -> float:
        """How long it may take to end when it is asked to; its ranks have a little less."""
        return float(self.config["parallel"]["grace_s"]) + 10.0


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job that runs.

    Args:
        ready: what it was.
        grant: what it was given.
        process: its processes.
        settings: of the sweep, with the limits of its time.
        epochs_before: of the run, when the job found it; None until then.
        now: what it was about when that was noted.
    """

    ready: ReadyJob
    grant: Grant
    process: JobProcess
    settings: Settings
    epochs_before: int | None = None
    now: Doing | None = None
    began: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    _oom_before: int | None = field(default_factory=oom_kills)
    _ended_by: EndedBy | None = None
    _kill_s: float | None = None
    _killed_s: float | None = None
    _looked_s: float = -math.inf
    _waits_since_s: float | None = None
    _leaving: bool = False
    _told_s: float | None = None

    @classmethod
    def start(cls, ready: ReadyJob, grant: Grant, *, whole: bool, settings: Settings) -> RunningJob:
        """Starts a job.

        Args:
            ready: the job.
            grant: what it gets.
            whole: that is all of the machine.
            settings: of the sweep.
        """
        inherited = {**os.environ, **ready.env}  # what the user says of threads, here or for jobs
        variables = environment(grant, whole=whole, inherited=inherited)
        chosen = None if settings.cores_per_rank is None else grant.threads
        process = JobProcess.start(
            ready.job,
            ready.config,
            hardware=None if whole else whole_machine(ready.config),
            cores=None if whole or not grant.binds else grant.cores,
            environment={
                **ready.env,
                **variables,
                **telling_threads(inherited, otherwise=chosen),
            },
        )
        return cls(ready=ready, grant=grant, process=process, settings=settings)

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began_s

    def note_epochs(self) -> None:
        """Notes what there was of its run before; to be called often, from its start on."""
        if self.epochs_before is None:
            anew = self.ready.config["force"]  # what there was is about to be removed
            self.epochs_before = 0 if anew else epochs_found(self.ready.job)

    def note_stage(self) -> None:
        """Notes once a second what it is about, and says where it begins to wait."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        waited = self.waits
        self.now, self._looked_s = doing(self.ready.job), now_s
        if self.waits and not waited:
            number = self.ready.job.number + 1
            log.info("job %d waits for another process, which does the same", number)

    @property
    def waits(self) -> bool:
        """Whether it waits for another process that does the same."""
        return self.now is not None and self.now.stage == "waits"

    def works_for(self, other: RunningJob) -> bool:
        """Whether it works on the run that the other one waits for."""
        if self is other or self.now is None or other.now is None or self.waits:
            return False
        return self.now.run is not None and self.now.run == other.now.run

    def note_wait(self, *, for_strangers: bool) -> None:
        """Notes since when it waits for a process that is none of this sweep's."""
        if not (self.waits and for_strangers):
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = time.monotonic()

    @property
    def is_asked(self) -> bool:
        """Whether it has been asked to end."""
        return self._ended_by is not None

    def end(self, signum: int, *, by: EndedBy, grace_s: float | None = None) -> None:
        """Asks it to end, and lets :meth:`look_after` kill what has not by then."""
        if self.process.exit_code() is None:
            self._ended_by = self._ended_by or by
            self.process.ask_to_end(signum)
        limit_s = self.ready.grace_s if grace_s is None else grace_s
        self._kill_s = time.monotonic() + limit_s

    def look_after(self, limit_signum: int) -> bool:
        """Ends it where it takes too long, and kills what does not end; whether all is gone."""
        now_s = time.monotonic()
        ended = self.process.exit_code() is not None
        if not ended and self._ended_by is None:
            self._end_what_takes_too_long(limit_signum, now_s)
        elif ended and not self._leaving:
            self._leaving = True
            self._kill_s = min(self._kill_s or math.inf, now_s + _LEAVING_S)
        if ended and self.process.is_gone():
            return True
        if self._kill_s is not None and now_s > self._kill_s:
            self.process.kill()
            self._killed_s = self._killed_s or now_s
            self._kill_s = now_s + _KILL_AGAIN_S  # what was just being started
        return False

    def cannot_be_ended(self) -> bool:
        """Whether something of it is left though it was killed a while ago."""
        return self._killed_s is not None and time.monotonic() - self._killed_s > ENDING_S

    def _end_what_takes_too_long(self, signum: int, now_s: float) -> None:
        if self._works_too_long():
            self.end(signum, by="limit")
        elif self._waits_too_long(now_s):
            self.end(signum, by="wait")
        elif self._told_s is None:
            self._told_s = None if self._told() is None else now_s
        elif now_s - self._told_s > _TOLD_S:
            number = self.ready.job.number + 1
            log.warning("job %d is over and does not end by itself: it is ended", number)
            self.end(signum, by="leaving", grace_s=_LEAVING_S)

    def _works_too_long(self) -> bool:
        limit_s = self.settings.job_limit_s
        aside_s = 0.0 if self.now is None else self.now.aside_at(time.time())
        return limit_s is not None and self.elapsed_s - aside_s > limit_s

    def _waits_too_long(self, now_s: float) -> bool:
        limit_s, since_s = self.settings.wait_limit_s, self._waits_since_s
        return limit_s is not None and since_s is not None and now_s - since_s > limit_s

    @property
    def _limit_s(self) -> float | None:
        """By which it was ended, where it was."""
        settings = self.settings
        limits = {"limit": settings.job_limit_s, "wait": settings.wait_limit_s}
        return limits.get(self._ended_by or "")

    def record(self) -> JobRecord:
        """What has come of it, which is left in the sweep's directory."""
        job = self.ready.job
        code = self.process.exit_code()
        assert code is not None or self._killed_s is not None, "it runs"
        end = End(
            exit_code=-signal.SIGKILL if code is None else code,
            left=tuple(self.process.left()),
            ended_by=self._ended_by,
            limit_s=self._limit_s,
            oom_kills=kills_since(self._oom_before),
        )
        told = self._told()
        if told is None and code == 0:
            mark = self.process.mark
            told = untold(job, self.ready.config, began_s=self.began, mark=mark)
        if told is None:
            found = verdict(None, end)
            told = record_of(
                job,
                status=found.status,
                run=None,
                error=found.error,
                exit_code=found.exit_code,
                began_s=self.began,
                ended_s=time.time(),
                log=str(job.log),
            )
            return keep_record(job, told)
        return keep_record(job, judged(told, end, log=str(job.log)))

    def _told(self) -> JobRecord | None:
        """What it has left itself; what another process has left there says nothing of it."""
        try:
            told = read_record(self.ready.job.record)
        except DataError:
            return None
        return told if told.mark == self.process.mark else None
