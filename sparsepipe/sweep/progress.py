"""How far a running job is, by the files that it and its run have written so far."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import DataError
from sparsepipe.sweep.record import SweptJob
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_mapping, write_json

log = logging.getLogger(__name__)
_TAIL_BYTES = 16_384


def write_started(job: SweptJob, run: Path, *, mark: str | None) -> None:
    """Writes a job's run directory to ``started.json``; the job goes on where that fails."""
    try:
        write_json(job.started, {"run": str(run), "mark": mark})
    except DataError as error:
        log.warning("the sweep cannot follow this job's progress: %s", error)


def started_run(job: SweptJob, *, mark: str | None = None) -> Path | None:
    """A job's run directory; None until it is known.

    Args:
        job: the job.
        mark: of the job's processes: files of other processes do not count; None: any do.
    """
    try:
        values = read_mapping(job.started, run=reading.name)
    except DataError:
        return None
    return Path(values["run"]) if mark in (None, values.get("mark")) else None


def epochs_done(job: SweptJob) -> int | None:
    """Finished epochs of a training, earlier attempts included; None before the first."""
    run = started_run(job)
    if run is None:
        return None
    try:
        with (run / "metrics.csv").open("rb") as stream:
            return max(0, sum(1 for line in stream if line.strip()) - 1)  # without the heading
    except OSError:  # written at the end of the first epoch
        return None


def epochs_in_all(spec: RunSpec) -> int | None:
    """The number of epochs that a training is to have; None where it is not limited by epochs."""
    epochs = spec.trainer.max_epochs
    return epochs if isinstance(epochs, int) and epochs > 0 else None


def tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size_bytes - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar writes its states over one another.
    shown = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in shown if line][-lines:]
