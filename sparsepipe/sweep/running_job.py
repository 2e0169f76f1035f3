"""One job while it runs: its processes, its time limit, and how it is ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import thread_variables
from sparsepipe.errors import DataError
from sparsepipe.runs.out_of_memory import kills_since, oom_kills
from sparsepipe.sweep.process import JobProcess
from sparsepipe.sweep.record import (
    EndedBy,
    JobEnd,
    JobRecord,
    SweptJob,
    keep_record,
    outcome,
    read_record,
    record_of,
    started_run,
)
from sparsepipe.sweep.resources import whole_machine
from sparsepipe.sweep.slots import Demand, Grant, Settings, environment

log = logging.getLogger(__name__)
_CHILDREN_END_S = 5.0
"""Seconds that a job's other processes may take to end after its first process has ended."""
_LINGER_S = 60.0
"""Seconds that a job's process may take to end after it has written its record."""
_KILL_AGAIN_S = 1.0
ENDING_S = 60.0
"""Seconds after the first SIGKILL until processes that still run are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyJob:
    """A job that can be started; ``env`` has the environment variables of ``hydra.job.env_set``."""

    job: SweptJob
    spec: RunSpec
    demand: Demand
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def grace_s(self) -> float:
        """Seconds that the job may take to end after a signal; its ranks have 10 s less."""
        return self.spec.parallel.grace_s + 10.0


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A running job: its processes, its grant and its time limit."""

    ready: ReadyJob
    grant: Grant
    process: JobProcess
    job_limit_s: float | None = None
    began: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    _oom_before: int | None = field(default_factory=oom_kills)
    ended_by: EndedBy | None = None
    _kill_s: float | None = None
    _killed_s: float | None = None
    _process_ended: bool = False
    _recorded_s: float | None = None

    @classmethod
    def start(cls, ready: ReadyJob, grant: Grant, *, whole: bool, settings: Settings) -> RunningJob:
        inherited = {**os.environ, **ready.env}  # threads that the user sets, here or for jobs
        variables = environment(grant, whole=whole, inherited=inherited)
        chosen = None if settings.cores_per_rank is None else grant.threads
        process = JobProcess.start(
            ready.job,
            ready.spec,
            hardware=None if whole else whole_machine(ready.spec),
            cores=None if whole or not grant.binds else grant.cores,
            environment={**ready.env, **variables, **thread_variables(inherited, otherwise=chosen)},
            wait_limit_s=settings.wait_limit_s,
        )
        return cls(ready=ready, grant=grant, process=process, job_limit_s=settings.job_limit_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def share(self) -> float | None:
        """Finished share of a training, by epochs in its run's ``metrics.csv``; None: unknown."""
        run, in_all = started_run(self.ready.job), self.ready.spec.trainer.max_epochs
        if run is None or in_all is None or in_all <= 0:
            return None
        try:
            with (run / "metrics.csv").open("rb") as stream:
                lines = sum(1 for line in stream if line.strip())  # one is the header
        except OSError:  # written at the end of the first epoch
            return None
        return min(1.0, max(0, lines - 1) / in_all)

    def end(self, signum: int, *, by: EndedBy, grace_s: float | None = None) -> None:
        """Sends the job a signal; :meth:`supervise` kills what still runs ``grace_s`` seconds later
        (None: the grace period of the job). ``by``: what ends the job, for its record.
        """
        limit_s = self.ready.grace_s if grace_s is None else grace_s
        self._kill_s = time.monotonic() + limit_s
        if self.process.exit_code() is None:
            self.ended_by = self.ended_by or by
            self.process.interrupt(signum)

    def supervise(self) -> bool:
        """Ends the job if it takes too long, and kills processes that do not end.

        Returns:
            Whether all its processes have ended, or are given up since they cannot be ended.
        """
        now_s = time.monotonic()
        ended = self.process.exit_code() is not None
        if not ended and self.ended_by is None:
            if self.job_limit_s is not None and self.elapsed_s > self.job_limit_s:
                self.end(signal.SIGTERM, by="limit")
            elif self._recorded_s is None:
                self._recorded_s = None if self._own_record() is None else now_s
            elif now_s - self._recorded_s > _LINGER_S:
                number = self.ready.job.number + 1
                log.warning("job %d has written its record but does not end: killing it", number)
                self.end(signal.SIGTERM, by="lingering", grace_s=_CHILDREN_END_S)
        elif ended and not self._process_ended:
            self._process_ended = True
            self._kill_s = min(self._kill_s or math.inf, now_s + _CHILDREN_END_S)
        if ended and not self.process.alive():
            return True
        if self._kill_s is not None and now_s > self._kill_s:
            self.process.kill()
            self._killed_s = self._killed_s or now_s
            self._kill_s = now_s + _KILL_AGAIN_S  # for processes that were just starting
        return self._killed_s is not None and now_s - self._killed_s > ENDING_S

    def record(self) -> JobRecord:
        """Writes the record of the job, which has ended, and returns it."""
        job = self.ready.job
        code = self.process.exit_code()
        assert code is not None or self._killed_s is not None, "it still runs"
        end = JobEnd(
            exit_code=-signal.SIGKILL if code is None else code,
            left=tuple(self.process.alive()),
            ended_by=self.ended_by,
            limit_s=self.job_limit_s if self.ended_by == "limit" else None,
            oom_kills=kills_since(self._oom_before),
        )
        own = self._own_record()
        status, error, exit_code = outcome(own, end)
        if own is None:
            own = record_of(job, status=status, run=None, began_s=self.began, ended_s=time.time())
        found = replace(own, status=status, error=error, exit_code=exit_code, log=str(job.log))
        return keep_record(job, found)

    def _own_record(self) -> JobRecord | None:
        """The record that the job itself has written; None without one, or if its mark differs."""
        try:
            record = read_record(self.ready.job.record)
        except DataError:
            return None
        return record if record.mark == self.process.mark else None
