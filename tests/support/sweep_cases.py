"""Records of a sweep's jobs, as these leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsepipe.sweep.record import JobRecord, SweptJob, record_of, write_record


def leave_record(
    sweep: Path,
    number: int,
    *overrides: str,
    run: Path | None,
    **more: Any,
) -> JobRecord:
    """Of a job that finished, or of one that failed, which has no run."""
    job = SweptJob(number=number, overrides=overrides, sweep=sweep)
    failed = {"status": "failed", "error": "it broke\n  remedy: mend it", "exit_code": 1}
    values = {"began_s": 1.0, "ended_s": 3.0, **(failed if run is None else {"status": "finished"})}
    told = None if run is None else str(run)
    return write_record(job, record_of(job, run=told, **{**values, **more}))
