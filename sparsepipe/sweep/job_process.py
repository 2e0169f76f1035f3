"""The process of a sweep's job: ``python -m sparsepipe.sweep.job_process job.yaml``.

It ends with the sweep's, even where that one is killed.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from sparsepipe.runtime.launch import follow_parent
from sparsepipe.sweep.record import SweptJob
from sparsepipe.tasks.fitting.memory import prefer_as_victim

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_RATHER_THAN_THE_SWEEP = 500
"""In thousandths of all memory: a rank of a job may be smaller than the process of the sweep. A
process that tries out a batch size is still ended before it."""


def main() -> None:
    """Runs the job that the given file holds."""
    given = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _end_with(given["parent"])
    prefer_as_victim(_RATHER_THAN_THE_SWEEP)
    if given["cores"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, given["cores"])  # before torch counts them
    sys.exit(_run(given))


def _end_with(parent: int) -> None:
    """Ends this process with its parent: by the kernel where it does that, and by looking."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    follow_parent(parent=parent)


def _run(given: dict[str, Any]) -> int:
    from sparsepipe.config.job_hardware import announce_hardware
    from sparsepipe.config.run_spec import RunSpec
    from sparsepipe.errors import SparsePipeError
    from sparsepipe.runs import logs
    from sparsepipe.runtime.failures.rank_reports import Stopped
    from sparsepipe.sweep.one_job import run_swept

    logs.configure()
    announce_hardware(given["hardware"])
    job = SweptJob(
        number=given["number"],
        overrides=tuple(given["overrides"]),
        sweep=Path(given["sweep"]),
    )
    try:
        # One rank needs no further process: this one is as fresh as can be. The sweep sees to how
        # long it waits, as it knows for whom.
        record = run_swept(
            job, lambda: RunSpec.from_dict(given["config"]), fresh_processes=False, wait_s=math.inf
        )
    except Stopped as stop:
        log.warning("%s", stop.message)
        return stop.exit_code
    except SparsePipeError as error:
        log.error("error: %s", error)
        return error.exit_code
    except Exception:
        log.exception("this job raised what is not the house's own")
        return 1
    log.info("%s", record.run)
    return 0


if __name__ == "__main__":
    main()
