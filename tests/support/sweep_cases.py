"""Records of a sweep's jobs, as these leave them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.sweep.record import JobRecord, SweptJob, keep_record, record_of
from tests.support.command_line import composed


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
    return keep_record(job, record_of(job, run=told, **{**values, **more}))


@functools.cache
def _tiny() -> RunSpec:
    return composed("experiment=tiny")


def tiny_spec(*, grace_s: float = 0.0, **changes: Any) -> RunSpec:
    """The configuration of a job on hardware that is written down, which is not run."""
    hardware = {"_target_": "sparsepipe.cluster.Inventory.from_dict", "value": {}}
    given = {"hardware": hardware, "parallel.grace_s": grace_s, "trainer.max_epochs": 1}
    return _tiny().replace({**given, **changes})
