"""Runs a sweep's jobs, as many at a time as find cores and GPUs."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.sweep.board import Board, Row
from sparsepipe.sweep.gpu_locks import GpuLocks
from sparsepipe.sweep.progress import epochs_done, epochs_in_all, tail
from sparsepipe.sweep.record import JobRecord, SweptJob, keep_record, refusal
from sparsepipe.sweep.remaining import Going
from sparsepipe.sweep.running import ENDING_S, ReadyJob, RunningJob
from sparsepipe.sweep.settings import Settings
from sparsepipe.sweep.shown import Lasting, say_run
from sparsepipe.sweep.slots import Slots
from sparsepipe.sweep.stop_signals import heard
from sparsepipe.sweep.unresponsive import Lost, refused
from sparsepipe.sweep.verdict import left_text
from sparsepipe.sweep.view import View

log = logging.getLogger(__name__)
_POLL_S = 0.05


class Runner:
    """The jobs of a sweep from their start to their records.

    Args:
        slots: the machine, with nothing taken.
        settings: of the sweep.
        texts: what each job is to be called, by its number.
        view: shows it.
        began: is told of each job that is about to be started.
        ended: is told what has come of each job.
        gpus: by which GPUs are kept from other sweeps; None: they are not.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        settings: Settings,
        texts: Mapping[int, str],
        view: View,
        began: Callable[[SweptJob], object],
        ended: Callable[[JobRecord], object],
        gpus: GpuLocks | None = None,
    ) -> None:
        self._tell_began, self._tell_ended = began, ended
        self._slots, self._settings, self._texts = slots, settings, texts
        self._view = Lasting(view)
        self._lost = Lost()
        self._waiting: list[ReadyJob] = []
        self._running: list[RunningJob] = []
        self._records: dict[int, JobRecord] = {}
        self._same: dict[int, list[SweptJob]] = {}
        self._gpus = gpus or GpuLocks()

    def run(
        self,
        jobs: Sequence[ReadyJob],
        *,
        same: Mapping[int, Sequence[SweptJob]],
        known: Sequence[JobRecord],
    ) -> dict[int, JobRecord]:
        """Runs all jobs, whatever becomes of one or the other.

        Args:
            jobs: in their order.
            same: by a job's number, others that are the very same: they share its record.
            known: records of jobs that could not be started.

        Returns:
            Records by number.

        Raises:
            Stopped: a signal came; every job has been ended.
        """
        self._waiting = list(jobs)
        self._same = {number: list(others) for number, others in same.items()}
        with self._view, self._gpus, heard() as signals:
            for record in known:
                self._note(record)
            try:
                self._loop(signals)
            finally:
                self._end_what_is_left(signals)
        if signals:
            raise Stopped(signals[0])
        return self._records

    def _loop(self, signals: Sequence[int]) -> None:
        told = 0
        while self._waiting or self._running:
            if len(signals) > told:
                self._stop(signals[told], at_once=told > 0)
                told += 1
            self._start_what_fits()
            for job in list(self._running):
                self._look_after(job)
            self._view.show(self._board)
            time.sleep(_POLL_S)

    def _look_after(self, job: RunningJob) -> None:
        job.note_epochs()
        job.note_stage()
        job.note_wait(for_strangers=not any(other.works_for(job) for other in self._running))
        if job.look_after(signal.SIGTERM):
            self._slots = self._slots.without_job(job.grant)
        elif job.cannot_be_ended():
            self._slots = self._slots.losing_job(job.grant)
            self._lost.add(job)
        else:
            return
        self._running.remove(job)
        self._note(job.record())

    def _start_what_fits(self) -> None:
        for job in self._lost.gone():
            self._slots = self._slots.regaining(job.grant)
        self._gpus.keep(self._slots)
        while self._waiting:
            if self._slots.has_lost(self._waiting[0].demand):
                if self._lost.may_return():
                    return
                self._note(refusal(self._waiting.pop(0).job, refused()))
                continue
            first = self._waiting[0]
            grant = self._gpus.grant(self._slots, first.demand, number=first.job.number)
            if grant is None:
                return
            ready = self._waiting.pop(0)
            whole = self._slots.is_whole(grant)
            self._tell_began(ready.job)
            try:
                job = RunningJob.start(ready, grant, whole=whole, settings=self._settings)
            except Exception as error:  # the others may start yet
                self._note(refusal(ready.job, error))
                continue
            self._slots = self._slots.with_job(grant)
            self._running.append(job)
            self._view.began(self._row(job), self._board)

    def _stop(self, signum: int, *, at_once: bool) -> None:
        self._waiting.clear()
        if not at_once and self._running:
            log.warning(
                "%s: ending %d jobs, which may write checkpoints; once more ends them at once",
                signal.Signals(signum).name,
                len(self._running),
            )
        for job in self._running:
            job.end(signum, by="stop", grace_s=0.0 if at_once else None)

    def _end_what_is_left(self, signals: Sequence[int]) -> None:
        """Where something has gone wrong here: jobs are asked, and killed after their grace.

        They leave their records themselves. A signal that comes meanwhile ends the grace.
        """
        if not self._running:
            return
        log.warning(
            "the sweep breaks: ending %d jobs, which may write checkpoints", len(self._running)
        )
        told = len(signals)
        for job in self._running:
            if not job.is_asked:
                with suppress(OSError):
                    job.end(signal.SIGTERM, by="stop")
        kill_s = time.monotonic() + max(job.ready.grace_s for job in self._running)
        while self._running and time.monotonic() < kill_s + ENDING_S:
            if len(signals) > told:
                kill_s = min(kill_s, time.monotonic())
            for job in list(self._running):
                with suppress(OSError):  # which may be what has gone wrong
                    if time.monotonic() >= kill_s:
                        job.process.kill()
                    if job.process.is_gone():
                        self._running.remove(job)
            time.sleep(_POLL_S)
        for job in self._running:
            log.warning("job %d: %s", job.ready.job.number + 1, left_text(job.process.left()))

    def _note(self, record: JobRecord) -> None:
        self._records[record.number] = record
        self._tell_ended(record)
        if record.run is not None:
            say_run(record.run)
        self._view.ended(self._row_of(record), self._board)
        for job in self._same.pop(record.number, []):
            twin = replace(record, number=job.number, overrides=job.overrides)
            self._note(keep_record(job, twin))

    def _board(self) -> Board:
        ended = [self._row_of(record) for record in self._records.values()]
        found = self._records.values()
        done = [one.seconds for one in found if one.status == "finished" and not one.before]
        return Board(
            rows=[*ended, *(self._row(job) for job in self._running)],
            total=len(self._texts),
            done_s=done,
        )

    def _row_of(self, record: JobRecord) -> Row:
        error = (record.error or "").splitlines()
        return Row(
            number=record.number + 1,
            text=self._texts[record.number],
            state="before" if record.before else record.status,
            seconds=record.seconds,
            detail=error[0] if error else "",
        )

    def _row(self, job: RunningJob) -> Row:
        swept = job.ready.job
        epochs, in_all = epochs_done(swept), epochs_in_all(job.ready.config)
        share = None if epochs is None or in_all is None else min(1.0, epochs / in_all)
        before = 0.0 if in_all is None else min(1.0, (job.epochs_before or 0) / in_all)
        last = tail(swept.log, lines=1)
        return Row(
            number=swept.number + 1,
            text=self._texts[swept.number],
            state="running" if job.now is None or job.now.works else job.now.stage,
            going=Going(elapsed_s=job.elapsed_s, share=share, share_before=before),
            detail=last[0].removeprefix("[sparsepipe] ") if last else "",
            seconds=job.elapsed_s,
        )
