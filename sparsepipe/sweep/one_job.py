"""One job of a sweep in the process at hand: it runs, and leaves its record however it ends."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparsepipe.aside import heard_by
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_directory import announced_start
from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.sweep.finished import of_run
from sparsepipe.sweep.record import (
    JobRecord,
    SweptJob,
    keep_record,
    record_of,
)
from sparsepipe.sweep.settings import WAIT_LIMIT_S
from sparsepipe.sweep.stages import Telling
from sparsepipe.sweep.tree import MARK_VARIABLE


def run_swept(
    job: SweptJob,
    resolved: Callable[[], RunSpec],
    *,
    fresh_processes: bool,
    wait_s: float = WAIT_LIMIT_S,
) -> JobRecord:
    """Runs a job of a sweep.

    A run that another process works on, maybe as another job of this sweep or as one that was
    killed with the last sweep and is about to end, is waited for. A run whose result has no such
    figure as the ``objective`` is finished, and its job has failed: no sweeper can use it.

    Args:
        job: which.
        resolved: makes its checked configuration.
        fresh_processes: start a process even for a single rank.
        wait_s: how long to wait for another process that works on the run; where no sweep of ours
            looks after the job, a day.

    Returns:
        The record of a finished job.

    Raises:
        SparsePipeError: something a user can mend; the record tells it too.
        Stopped: a signal ended the job.
        Exception: whatever the user's own code raised.
    """
    began, mark = time.time(), os.environ.get(MARK_VARIABLE)

    def leave(**values: Any) -> JobRecord:
        record = record_of(job, began_s=began, ended_s=time.time(), mark=mark, **values)
        return keep_record(job, record)

    telling = Telling(job.started, mark=mark)
    with _recorded_failures(leave), heard_by(telling.hear):
        spec = resolved()
        from sparsepipe.launch.job import run_job

        directory = run_job(
            spec,
            fresh_processes=fresh_processes,
            wait_s=wait_s,
            anew_since_s=announced_start(),
            found=lambda run: telling.note_run(run.path),
        )
        values = of_run(directory.path, objective=spec.objective, began_s=began)
    return leave(**values)


@contextmanager
def _recorded_failures(leave: Callable[..., object]) -> Iterator[None]:
    """Leaves a record of what ends the job within, and lets it pass."""
    try:
        yield
    except Stopped as stop:
        leave(status="stopped", run=None, error=stop.message, exit_code=stop.exit_code)
        raise
    except SparsePipeError as error:
        leave(status="failed", run=None, error=str(error), exit_code=error.exit_code)
        raise
    except Exception as error:
        told = "".join(traceback.format_exception_only(error)).strip()
        leave(status="failed", run=None, error=told, exit_code=1)
        raise
