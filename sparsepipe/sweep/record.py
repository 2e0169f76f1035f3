"""A sweep's jobs and their records in the sweep's directory, whichever process ran them.

``<sweep>/jobs/<number>/`` holds ``record.json``, written when the job has ended, and, where our
launcher has started it, ``job.yaml`` (its input), ``started.json`` (its run directory as soon as
that is known) and ``log.txt`` (its output).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from sparsepipe.config.check import check_fields
from sparsepipe.errors import REMEDY, DataError, DivergedError, SparsePipeError
from sparsepipe.runs.best import NONFINITE, without_figure
from sparsepipe.runs.metrics import read_rows
from sparsepipe.utils import reading
from sparsepipe.utils.arguments import is_number
from sparsepipe.utils.files import read_mapping, write_json

log = logging.getLogger(__name__)
_TAIL_BYTES = 16_384

Status = Literal["finished", "failed", "stopped", "not started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptJob:
    """A job of a sweep, before it has a result.

    Attributes:
        path: the job's directory.
        file: input of its process.
        log: output of its process.
        started: file that names the run directory as soon as it is known.
        record: file with its :class:`JobRecord`.
    """

    number: int
    overrides: tuple[str, ...]
    sweep: Path
    path: Path = field(init=False)
    file: Path = field(init=False)
    log: Path = field(init=False)
    started: Path = field(init=False)
    record: Path = field(init=False)

    def __post_init__(self) -> None:
        path = self.sweep / "jobs" / str(self.number)
        object.__setattr__(self, "path", path)
        names = {"file": "job.yaml", "log": "log.txt", "started": "started.json"}
        for attribute, name in {**names, "record": "record.json"}.items():
            object.__setattr__(self, attribute, path / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The result of a job.

    Args:
        number: number of the job, from 0.
        overrides: the job's overrides.
        status: ``finished``, ``failed``, ``stopped``, or ``not started`` where the sweep was
            stopped before the turn of the job.
        run: the run's directory; None where it did not finish.
        error: why it did not finish, with a remedy.
        exit_code: 0 if it finished.
        began_s: time at its beginning, in seconds since 1970.
        ended_s: time at its end, in seconds since 1970.
        before: whether the run had been finished before the job began.
        value: value of the run's ``objective``, for sweepers that search; None without one.
        log: the file with its output, if our launcher started it.
        mark: mark of its processes (:mod:`.process`), if our launcher started them.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    number: int
    overrides: tuple[str, ...]
    status: Status
    run: str | None
    error: str | None = None
    exit_code: int = 0
    began_s: float
    ended_s: float
    before: bool = False
    value: float | None = None
    log: str | None = None
    mark: str | None = None


def own_texts(overrides: Sequence[Sequence[str]], *, given: Sequence[str] = ()) -> list[str]:
    """A label for each job: its overrides without those that all jobs share; all if none is left.

    Args:
        overrides: the overrides of each job.
        given: overrides of the sweep's command, which all jobs share, even if a search has
            started only one.
    """
    jobs = [[item.lstrip("+") for item in job] for job in overrides]
    shared = set(jobs[0]).intersection(*jobs[1:]) if len(jobs) > 1 else set()
    shared |= {item.lstrip("+") for item in given}
    own = [" ".join(item for item in job if item not in shared) for job in jobs]
    return [text or " ".join(job) for text, job in zip(own, jobs, strict=True)]


def record_of(job: SweptJob, **values: Any) -> JobRecord:
    return JobRecord(number=job.number, overrides=job.overrides, **values)


def keep_record(job: SweptJob, record: JobRecord) -> JobRecord:
    """Writes a record atomically and returns it; warns if it cannot be written."""
    try:
        write_json(job.record, dataclasses.asdict(record))
    except DataError as error:
        log.warning("the record of job %d cannot be written: %s", job.number + 1, error)
    return record


def refusal(job: SweptJob, error: Exception | None, **known: Any) -> JobRecord:
    """Writes and returns the record of a job that failed or was not started.

    Args:
        job: the job.
        error: the reason; None: the sweep was stopped before the job's turn.
        **known: further values of the record; without ``began_s``, the job begins as it ends.
    """
    status: Status = "not started" if error is None else "failed"
    text, code = "the sweep was stopped before its turn", 1
    if isinstance(error, SparsePipeError):
        text, code = str(error), error.exit_code
    elif error is not None:
        text = "".join(traceback.format_exception_only(error)).strip()
    now_s = time.time()
    values = {"error": text, "exit_code": code, "began_s": now_s, "ended_s": now_s, **known}
    return keep_record(job, record_of(job, status=status, run=None, **values))


def finished_values(run: Path, *, objective: str | None, began_s: float) -> dict[str, Any]:
    """Values of a finished run for its record; raises a ConfigError if it lacks ``objective``."""
    value = objective_value(run, objective)
    try:
        ended_s = read_mapping(run / "DONE.json", time=reading.amount)["time"]
    except DataError:
        ended_s = math.inf
    return {"status": "finished", "run": str(run), "before": ended_s < began_s, "value": value}


def read_record(path: Path) -> JobRecord:
    """Reads a record; raises a DataError if it is missing or broken."""
    values = read_mapping(path)
    if problems := [*check_fields(values, JobRecord)]:
        raise DataError(
            f"{path} does not hold the record of a job: {'; '.join(problems)}",
            remedy="run the sweep again: finished runs are skipped",
        )
    return JobRecord(**{**values, "overrides": tuple(values["overrides"])})


def records_of(sweep: Path) -> list[JobRecord]:
    """Reads the records of a sweep's jobs so far, by job number; warns of unreadable ones."""
    found = []
    for path in sweep.glob("jobs/*/record.json"):
        try:
            found.append(read_record(path))
        except DataError as error:
            log.warning("%s", error)
    return sorted(found, key=lambda record: record.number)


class ScoredRun(str):
    """A run's directory, which ``float`` turns into the value of the run's objective.

    Sweepers that search, such as Optuna's, do this with the return value of a job.
    """

    value: float

    def __new__(cls, directory: str, value: float) -> ScoredRun:
        run = super().__new__(cls, directory)
        run.value = value
        return run

    def __float__(self) -> float:
        return self.value

    def __reduce__(self) -> tuple[object, ...]:
        return ScoredRun, (str(self), self.value)  # launchers pass it between processes


def scored(directory: str, value: float | None) -> str:
    """A finished run's directory, as a :class:`ScoredRun` if its objective has a value."""
    return directory if value is None else ScoredRun(directory, value)


def objective_value(directory: Path, objective: str | None) -> float | None:
    """The value of the figure ``objective`` in a run's result; None if ``objective`` is None.

    Raises a ConfigError if the result lacks this figure, and a DivergedError if the figure, or the
    loss or weights of the training, were not finite.
    """
    if objective is None:
        return None
    result = read_mapping(directory / "result.json")
    found = result.get(NONFINITE)
    if found is None and result.get(objective, 0) is None:  # as is written what is not finite
        rows = read_rows(directory / "metrics.csv")
        if rows and not math.isfinite(float(rows[-1].get(objective) or 0)):
            found = f"{objective} is {rows[-1][objective]} in the last epoch"
    if found is not None:
        raise DivergedError(
            f"the training has diverged, so its {objective} does not count: {found}",
            remedy=f"search among other values, such as lower learning rates; see {directory}",
        )
    figures = [key for key, value in result.items() if is_number(value)]
    if objective not in figures:
        raise without_figure(
            f"objective={objective} is not a number in {directory}/result.json",
            objective,
            figures,
            remedy="set objective to one of its keys that has a number, such as val/accuracy; the "
            "finished run is then not repeated",
        )
    return float(result[objective])


def write_started(job: SweptJob, run: Path, *, mark: str | None) -> None:
    """Writes a job's run directory to ``started.json``; the job goes on if that fails."""
    try:
        write_json(job.started, {"run": str(run), "mark": mark})
    except DataError as error:
        log.warning("the sweep cannot follow this job's progress: %s", error)


def started_run(job: SweptJob) -> Path | None:
    """A job's run directory; None until it is known."""
    try:
        return Path(read_mapping(job.started, run=reading.name)["run"])
    except DataError:
        return None


def tail(path: Path, *, lines: int) -> list[str]:
    """The last non-empty lines of a log, at most ``lines``; none if it cannot be read."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size_bytes - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar overwrites its line after each carriage return.
    shown = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in shown if line][-lines:]


EndedBy = Literal["limit", "stop", "lingering"]
_OUT_OF_MEMORY = "killed by the OOM killer: the machine (or the container) ran out of memory"
_LESS_MEMORY = (
    "reduce jobs' memory (data.batch_size), or run fewer at a time (hydra.launcher.max_jobs)"
)
_GO_ON = "give the command again, which goes on from the run's last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How the processes of a job ended.

    Args:
        exit_code: exit code of the first process.
        ended_by: the time limit, a stop of the sweep, or lingering after the record; None: nothing.
        limit_s: the job's limit in seconds, if that ended them.
        oom_kills: number of processes on the machine that the OOM killer ended while the job ran;
            None: unknown.
        left: ids of processes that still run although they were killed.
    """

    exit_code: int
    ended_by: EndedBy | None = None
    limit_s: float | None = None
    oom_kills: int | None = None
    left: tuple[int, ...] = ()


def outcome(record: JobRecord | None, end: JobEnd) -> tuple[Status, str | None, int]:
    """Status, error and exit code of a job, from its own record, if any, and its processes' end."""
    if record is not None and record.status == "finished":
        return "finished", None, 0
    status: Status = "failed"
    code = 1 if record is None else record.exit_code or 1
    remedies = [f"see its log; {_GO_ON}"]
    if record is not None and record.status == "failed":
        cause, _, remedy = (record.error or "it failed").partition(REMEDY)
        remedies = [remedy] if remedy else []
        if end.oom_kills and "SIGKILL" in cause:
            cause, remedies = f"{cause}; {_OUT_OF_MEMORY}", [_LESS_MEMORY, *remedies]
        if end.ended_by is not None:
            cause += "; and its processes had to be ended"
    elif end.ended_by == "stop":
        status, cause, remedies = "stopped", "ended with the sweep", []
    elif end.ended_by == "limit":
        cause = f"it hung or was too slow: ended by hydra.launcher.job_limit_s={end.limit_s:g}"
        code = 1
    elif record is not None:
        status, (cause, _, remedy) = record.status, (record.error or "").partition(REMEDY)
        remedies = [remedy] if remedy else []
    elif end.exit_code == -signal.SIGKILL:
        code, remedies = 128 + signal.SIGKILL, [_LESS_MEMORY, _GO_ON]
        killed = "its process was killed by SIGKILL, as the OOM killer does when memory runs out"
        cause = _OUT_OF_MEMORY if end.oom_kills else killed
    elif end.exit_code < 0:
        code = 128 - end.exit_code
        cause = f"its process was killed by {signal.Signals(-end.exit_code).name}"
    else:
        code = end.exit_code or 1
        cause = f"its process ended with exit code {end.exit_code} and left no record"
    if end.left:
        cause, remedies = f"{cause}; {left_text(end.left)}", [*remedies, "see dmesg"]
    return status, cause + (REMEDY + "; ".join(remedies) if remedies else ""), code


def left_text(left: Sequence[int]) -> str:
    """Message that the processes with the ids ``left`` still run although they were killed."""
    if len(left) == 1:
        return f"process {left[0]} is still running although it was killed"
    return f"processes {', '.join(map(str, left))} are still running although they were killed"
