"""What each job of a sweep leaves in the sweep's directory, whichever process ran it.

``<sweep>/jobs/<number>/`` holds ``record.json``, written when the job has ended, and, where our
launcher has started it, ``job.yaml`` (what it was given), ``started.json`` (what
it is doing, and its run directory as soon as that is known) and ``log.txt`` (what it said).
"""

from __future__ import annotations

import dataclasses
import logging
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparsepipe.errors import DataError, SparsePipeError
from sparsepipe.results.files import read_json, write_json

log = logging.getLogger(__name__)

_unwritten: dict[Path, JobRecord] = {}
"""Records that this process could not write, by their files."""

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptJob:
    """A job of a sweep, before anything has come of it.

    Args:
        number: from 0.
        overrides: of the command line, its own ones and those of all jobs.
        sweep: the sweep's directory.
    """

    number: int
    overrides: tuple[str, ...]
    sweep: Path

    @property
    def path(self) -> Path:
        """Where it leaves what it leaves."""
        return self.sweep / "jobs" / str(self.number)

    @property
    def file(self) -> Path:
        """What its process is given."""
        return self.path / "job.yaml"

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.path / "log.txt"

    @property
    def started(self) -> Path:
        """Its stage and since when, and where its run is, once that is known."""
        return self.path / "started.json"

    @property
    def record(self) -> Path:
        """What has come of it."""
        return self.path / "record.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What has come of a job.

    Args:
        number: from 0.
        overrides: as :class:`SweptJob` has them.
        status: what has come of it.
        run: the run's directory; None where it did not finish.
        error: why it did not, with a remedy.
        exit_code: 0 where it finished.
        began_s: in seconds since 1970.
        ended_s: in seconds since 1970.
        before: the run had been finished before the job began.
        value: of the run's ``objective``, for sweepers that search; None where none is asked for.
        log: file with what it said, where it had one of its own.
        mark: of the processes that it ran in, where our launcher has started these.
    """

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

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.ended_s - self.began_s)

    @property
    def text(self) -> str:
        """What the job was, as the command line has it."""
        return " ".join(override.lstrip("+") for override in self.overrides)


def record_of(job: SweptJob, **values: Any) -> JobRecord:
    """A record with what is known of the job."""
    return JobRecord(number=job.number, overrides=job.overrides, **values)


def write_record(job: SweptJob, record: JobRecord) -> JobRecord:
    """Leaves a record, whole or not at all, and returns it.

    Raises:
        DataError: it cannot be written.
    """
    write_json(job.record, dataclasses.asdict(record))
    return record


def keep_record(job: SweptJob, record: JobRecord) -> JobRecord:
    """Does the same for who has more to do, whatever the disk says.

    What cannot be written is told and counts all the same in this process: :func:`records_of`
    knows it, and tries to write it again.
    """
    _unwritten.pop(job.record, None)
    try:
        return write_record(job, record)
    except DataError as error:
        log.warning("job %d leaves no record for now: %s", job.number + 1, error)
        _unwritten[job.record] = record
        return record


def refusal(job: SweptJob, error: Exception) -> JobRecord:
    """Leaves and returns the record of a job that could not be started."""
    now_s = time.time()
    if isinstance(error, SparsePipeError):
        told, code = str(error), error.exit_code
    else:
        told, code = "".join(traceback.format_exception_only(error)).strip(), 1
    record = record_of(
        job,
        status="failed",
        run=None,
        error=told,
        exit_code=code,
        began_s=now_s,
        ended_s=now_s,
    )
    return keep_record(job, record)


def read_record(path: Path) -> JobRecord:
    """Reads a record.

    Raises:
        DataError: it is missing or broken.
    """
    values = read_json(path)
    try:
        return JobRecord(**{**values, "overrides": tuple(values["overrides"])})
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{path} does not hold the record of a job",
            remedy="run the sweep again: finished runs are skipped",
        ) from error


def records_of(sweep: Path) -> list[JobRecord]:
    """What the jobs of a sweep have left so far, in their order.

    What cannot be read is told, and left out: the others count all the same. What this
    process could not write counts too, and is written now where that can be.
    """
    found = {path: record for path, record in _unwritten.items() if path.parents[2] == sweep}
    for path, record in found.items():
        with suppress(DataError):  # which has been told
            write_json(path, dataclasses.asdict(record))
            del _unwritten[path]
    for path in sweep.glob("jobs/*/record.json"):
        try:
            found[path] = found.get(path) or read_record(path)
        except DataError as error:
            log.warning("%s", error)
    return sorted(found.values(), key=lambda record: record.number)
