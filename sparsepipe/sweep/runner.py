"""Runs a sweep's jobs, as many at a time as the machine has cores and GPUs for."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from operator import methodcaller

from sparsepipe.runs.signals import SIGNALS
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.sweep.display import JobRow, Lines, SafeDisplay, SweepState, print_run
from sparsepipe.sweep.record import JobRecord, SweptJob, keep_record, left_text, refusal, tail
from sparsepipe.sweep.running_job import ENDING_S, ReadyJob, RunningJob
from sparsepipe.sweep.slots import Settings, Slots

log = logging.getLogger(__name__)
_POLL_S = 0.05


class Runner:
    """Runs the jobs of a sweep, shows their progress and writes their records.

    Args:
        slots: the machine's cores and GPUs.
        settings: settings of the launcher.
        texts: labels of all jobs, also of earlier ones, by number.
        view: shows the sweep; None: a live table in a terminal, log lines elsewhere.
        on_start: called before each job.
        on_end: called with each job's record.
        earlier: records of this sweep's jobs that an earlier call of the launcher has run.
        total: number of jobs that the sweep will have; None: as many as ``texts`` has.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        settings: Settings,
        texts: Mapping[int, str],
        view: Lines | None = None,
        on_start: Callable[[SweptJob], object],
        on_end: Callable[[JobRecord], object],
        earlier: Sequence[JobRecord] = (),
        total: int | None = None,
    ) -> None:
        self._on_start, self._on_end = on_start, on_end
        self._slots, self._settings, self._texts = slots, settings, texts
        self._display = SafeDisplay(view)
        self._waiting: list[ReadyJob] = []
        self._running: list[RunningJob] = []
        self._records: dict[int, JobRecord] = {}
        self._same: dict[int, list[SweptJob]] = {}
        self._earlier = list(earlier)
        self._total = len(texts) if total is None else total

    def run(
        self,
        jobs: Sequence[ReadyJob],
        *,
        same: Mapping[int, Sequence[SweptJob]],
        known: Sequence[JobRecord],
    ) -> dict[int, JobRecord]:
        """Runs all jobs and returns their records by number; a failed job does not end the others.

        ``same``: further jobs with the same configuration as a job, by its number; ``known``:
        records of jobs that could not be started. A signal ends all jobs and raises Stopped.
        """
        self._waiting = list(jobs)
        self._same = {number: list(others) for number, others in same.items()}
        with closing(self._display), _signals_noted() as signals:
            for record in known:
                self._add(record)
            try:
                self._loop(signals)
            finally:
                self._end_what_is_left(signals)
        if signals:
            raise Stopped(signals[0])
        return self._records

    def _loop(self, signals: Sequence[int]) -> None:
        passed_on = 0
        while self._waiting or self._running:
            if len(signals) > passed_on:
                self._stop(signals[passed_on], at_once=passed_on > 0)
                passed_on += 1
            self._start_what_fits()
            for job in list(self._running):
                if job.supervise():
                    self._running.remove(job)
                    self._add(job.record())
            self._display.show(lambda view: view.show(self._state))
            time.sleep(_POLL_S)

    def _start_what_fits(self) -> None:
        while self._waiting:
            slots = replace(self._slots, taken=tuple(job.grant for job in self._running))
            if (grant := slots.grant(self._waiting[0].demand)) is None:
                return
            ready = self._waiting.pop(0)
            whole = self._slots.is_whole(grant)
            self._on_start(ready.job)
            try:
                job = RunningJob.start(ready, grant, whole=whole, settings=self._settings)
            except Exception as error:  # the others may still start
                self._add(refusal(ready.job, error))
                continue
            self._running.append(job)
            self._display.show(methodcaller("began", self._row(job), self._state))

    def _stop(self, signum: int, *, at_once: bool) -> None:
        for ready in self._waiting:
            for each in (ready.job, *self._same.pop(ready.job.number, [])):
                self._records[each.number] = refusal(each, None)
        self._waiting.clear()
        if not at_once and self._running:
            log.warning(
                "%s: ending %s, which may write checkpoints; a second signal ends them at once",
                signal.Signals(signum).name,
                "1 job" if len(self._running) == 1 else f"{len(self._running)} jobs",
            )
        for job in self._running:
            job.end(signum, by="stop", grace_s=0.0 if at_once else None)

    def _end_what_is_left(self, signals: Sequence[int]) -> None:
        """Ends jobs after an error of the sweep: SIGTERM, then SIGKILL after grace or a signal."""
        if not self._running:
            return
        jobs = "1 job" if len(self._running) == 1 else f"{len(self._running)} jobs"
        log.warning("the sweep fails: ending %s, which may write checkpoints", jobs)
        known = len(signals)
        for job in self._running:
            if job.ended_by is None:
                with suppress(OSError):
                    job.end(signal.SIGTERM, by="stop")
        limit_s = time.monotonic() + max(job.ready.grace_s for job in self._running) + ENDING_S
        while self._running and time.monotonic() < limit_s:
            for job in list(self._running):
                with suppress(OSError):  # which may be the error at hand
                    if len(signals) > known:
                        job.end(signal.SIGTERM, by="stop", grace_s=0.0)
                    if job.supervise():
                        self._running.remove(job)
            known = len(signals)
            time.sleep(_POLL_S)
        for job in self._running:
            log.warning("job %d: %s", job.ready.job.number + 1, left_text(job.process.alive()))

    def _add(self, record: JobRecord) -> None:
        self._records[record.number] = record
        self._on_end(record)
        if record.run is not None:
            print_run(record.run)
        row = self._row_of(record)
        self._display.show(lambda view: view.ended(row, self._state))
        for job in self._same.pop(record.number, []):
            twin = replace(record, number=job.number, overrides=job.overrides)
            self._add(keep_record(job, twin))

    def _state(self) -> SweepState:
        found = [*self._earlier, *self._records.values()]
        ended = [self._row_of(record) for record in found if record.status != "not started"]
        return SweepState(
            rows=[*ended, *(self._row(job) for job in self._running)], total=self._total
        )

    def _row_of(self, record: JobRecord) -> JobRow:
        error = (record.error or "").splitlines()
        return JobRow(
            number=record.number + 1,
            text=self._texts[record.number],
            state="before" if record.before else record.status,
            seconds=max(0.0, record.ended_s - record.began_s),
            detail=error[0] if error else "",
        )

    def _row(self, job: RunningJob) -> JobRow:
        swept = job.ready.job
        last = tail(swept.log, lines=1)
        return JobRow(
            number=swept.number + 1,
            text=self._texts[swept.number],
            state="running",
            share=job.share(),
            detail=last[0].removeprefix("[sparsepipe] ") if last else "",
            seconds=job.elapsed_s,
        )


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Yields a list to which signals that arrive in the block are added, except ignored ones."""
    found: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame: found.append(signum))
    try:
        yield found
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
