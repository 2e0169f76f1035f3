"""Runs one job of a sweep in its own process and writes its record, however the job ends.

The launcher starts ``python -m sparsepipe.sweep.job job.yaml``. That process ends with the
sweep's, even if the sweep is killed.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_environment import BEGAN
from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.sweep.process import MARK_VARIABLE
from sparsepipe.sweep.record import (
    JobRecord,
    SweptJob,
    finished_values,
    keep_record,
    record_of,
    refusal,
    write_started,
)
from sparsepipe.sweep.slots import WAIT_LIMIT_S
from sparsepipe.tasks.fitting.memory import prefer_as_victim
from sparsepipe.utils.process import end_with_parent

log = logging.getLogger(__name__)
_OOM_SCORE = 500
"""Addition to a job's score (in thousandths of all memory) with which the OOM killer chooses it
rather than the sweep; a process that tries out a batch size still has a higher one."""


def run_swept(
    job: SweptJob,
    resolved: Callable[[], RunSpec],
    *,
    fresh_processes: bool,
    wait_s: float = WAIT_LIMIT_S,
) -> JobRecord:
    """Runs a job of a sweep, writes its record, and returns it or raises the job's error.

    ``resolved`` returns the job's configuration; ``fresh_processes`` as for ``run_job``. Waits up
    to ``wait_s`` seconds while another process works on the same run. A job whose run finishes
    without the figure that ``objective`` names has failed, since no sweeper can use it.
    """
    began, mark = time.time(), os.environ.get(MARK_VARIABLE)

    def leave(**values: Any) -> JobRecord:
        record = record_of(job, began_s=began, ended_s=time.time(), mark=mark, **values)
        return keep_record(job, record)

    try:
        spec = resolved()
        from sparsepipe.launch.job import run_job

        directory = run_job(
            spec,
            fresh_processes=fresh_processes,
            wait_s=wait_s,
            anew_since_s=float(os.environ[BEGAN]) if os.environ.get(BEGAN) else None,
            found=lambda run: write_started(job, run.path, mark=mark),
        )
        values = finished_values(directory.path, objective=spec.objective, began_s=began)
    except Stopped as stop:
        leave(status="stopped", run=None, error=stop.message, exit_code=stop.exit_code)
        raise
    except Exception as error:
        refusal(job, error, began_s=began, mark=mark)
        raise
    return leave(**values)


def main() -> None:
    """Runs the job that is described by the YAML file in the first argument of the command."""
    given: dict[str, Any] = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    end_with_parent(given["parent"])
    prefer_as_victim(_OOM_SCORE)
    if given["cores"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, given["cores"])  # before torch counts them
    from sparsepipe.config.sweep_environment import announce_hardware
    from sparsepipe.runs import logs

    logs.configure()
    announce_hardware(given["hardware"])
    job = SweptJob(
        number=given["number"], overrides=tuple(given["overrides"]), sweep=Path(given["sweep"])
    )
    limit_s = given["wait_limit_s"]
    try:
        # A single rank needs no further process, since this one is fresh.
        record = run_swept(
            job,
            lambda: RunSpec.from_dict(given["config"]),
            fresh_processes=False,
            wait_s=math.inf if limit_s is None else limit_s,
        )
    except Stopped as stop:
        log.warning("%s", stop.message)
        sys.exit(stop.exit_code)
    except SparsePipeError as error:
        log.error("error: %s", error)
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the job failed with an unexpected exception")
        sys.exit(1)
    log.info("%s", record.run)


if __name__ == "__main__":
    main()
