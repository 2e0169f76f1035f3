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

from sparsepipe.errors import DataError
from sparsepipe.experiment.oom import kills_since, oom_kills
from sparsepipe.experiment.sweep.needs import whole_machine
from sparsepipe.experiment.sweep.process import JobProcess
from sparsepipe.experiment.sweep.progress import Doing, doing, epochs_found, working_s
from sparsepipe.experiment.sweep.record import (
    JobRecord,
    SweptJob,
    read_record,
    record_of,
    write_record,
)
from sparsepipe.experiment.sweep.slots import Demand, Grant, environment
from sparsepipe.experiment.sweep.verdict import End, EndedBy, judged, verdict

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
        wait_limit_s: how long it waits for another process; None: as long as that takes.
    """

    job: SweptJob
    config: Mapping[str, Any]
    demand: Demand
    env: Mapping[str, str] = field(default_factory=dict)
    wait_limit_s: float | None = None

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
        limit_s: how long it may take; None: as long as it likes.
        epochs_before: of the run, when the job found it; None until then.
        now: what it was about when that was noted.
    """

    ready: ReadyJob
    grant: Grant
    process: JobProcess
    limit_s: float | None
    epochs_before: int | None = None
    now: Doing | None = None
    began: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    _oom_before: int | None = field(default_factory=oom_kills)
    _ended_by: EndedBy | None = None
    _kill_s: float | None = None
    _killed_s: float | None = None
    _looked_s: float = -math.inf
    _leaving: bool = False
    _told_s: float | None = None

    @classmethod
    def start(
        cls, ready: ReadyJob, grant: Grant, *, whole: bool, limit_s: float | None
    ) -> RunningJob:
        """Starts a job.

        Args:
            ready: the job.
            grant: what it gets.
            whole: that is all of the machine.
            limit_s: how long it may take.
        """
        inherited = {**os.environ, **ready.env}  # what the user says of threads, here or for jobs
        variables = environment(grant, whole=whole, inherited=inherited)
        process = JobProcess.start(
            ready.job,
            ready.config,
            hardware=None if whole else whole_machine(ready.config),
            cores=None if whole else grant.cores,
            environment={**ready.env, **variables},
            wait_limit_s=ready.wait_limit_s,
        )
        return cls(ready=ready, grant=grant, process=process, limit_s=limit_s)

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began_s

    def note_epochs(self) -> None:
        """Notes what there was of its run before; to be called often, from its start on."""
        if self.epochs_before is None:
            anew = self.ready.config["force"]  # what there was is about to be removed
            self.epochs_before = 0 if anew else epochs_found(self.ready.job)

    def begins_to_wait(self) -> bool:
        """Notes once a second what it is about; whether it waits for another process by now."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return False
        before, self.now, self._looked_s = self.now, doing(self.ready.job), now_s
        waited = before is not None and before.stage == "waits"
        return self.now is not None and self.now.stage == "waits" and not waited

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
        if self._is_over_limit():
            self.end(signum, by="limit")
        elif self._told_s is None:
            self._told_s = None if self._told() is None else now_s
        elif now_s - self._told_s > _TOLD_S:
            number = self.ready.job.number + 1
            log.warning("job %d is over and does not end by itself: it is ended", number)
            self.end(signum, by="leaving", grace_s=_LEAVING_S)

    def _is_over_limit(self) -> bool:
        if self.limit_s is None or self.elapsed_s <= self.limit_s:
            return False
        worked_s = working_s(
            doing(self.ready.job), elapsed_s=self.elapsed_s, wait_limit_s=self.ready.wait_limit_s
        )
        return worked_s > self.limit_s

    def record(self) -> JobRecord:
        """What has come of it, which is left in the sweep's directory."""
        job = self.ready.job
        code = self.process.exit_code()
        assert code is not None or self._killed_s is not None, "it runs"
        end = End(
            exit_code=-signal.SIGKILL if code is None else code,
            left=tuple(self.process.left()),
            ended_by=self._ended_by,
            limit_s=self.limit_s,
            oom_kills=kills_since(self._oom_before),
        )
        told = self._told()
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
            return write_record(job, told)
        return write_record(job, judged(told, end, log=str(job.log)))

    def _told(self) -> JobRecord | None:
        """What it has left itself; what another process has left there says nothing of it."""
        try:
            told = read_record(self.ready.job.record)
        except DataError:
            return None
        return told if told.mark == self.process.mark else None
