"""What a job's record says where its run is finished, by what the run itself has left."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.config.objective import value_of
from sparsepipe.errors import DataError, SparsePipeError
from sparsepipe.results.files import read_json
from sparsepipe.sweep.record import JobRecord, SweptJob, record_of
from sparsepipe.sweep.stages import doing

_DONE = "DONE.json"


def of_run(run: Path, *, objective: str | None, began_s: float) -> dict[str, Any]:
    """Values of the record of a job whose run is finished.

    Args:
        run: its directory.
        objective: key of its result that it is worth; None: it has no value.
        began_s: when the job began, in seconds since 1970.

    Raises:
        ConfigError: the result has no such figure.
        DataError: the result cannot be read.
    """
    value = value_of(run, objective)
    before = _ended_s(run / _DONE) < began_s
    return {"status": "finished", "run": str(run), "before": before, "value": value}


def untold(
    job: SweptJob, config: Mapping[str, Any], *, began_s: float, mark: str
) -> JobRecord | None:
    """The record of a job that has ended well and could not leave one, as on a full disk.

    Args:
        job: which; its process has ended with exit code 0.
        config: its own.
        began_s: when it began, in seconds since 1970.
        mark: of its processes: what others have left there says nothing of it.

    Returns:
        The record; None where it tells of no run, or of one that is not finished.
    """
    now = doing(job)
    if now is None or now.run is None or now.mark != mark or not (Path(now.run) / _DONE).exists():
        return None
    times = {"began_s": began_s, "ended_s": time.time(), "mark": mark}
    try:
        values = of_run(Path(now.run), objective=config["objective"], began_s=began_s)
    except SparsePipeError as error:  # what it has read a moment ago
        code = error.exit_code
        values = {"status": "failed", "run": None, "error": str(error), "exit_code": code}
    return record_of(job, **times, **values)


def _ended_s(done: Path) -> float:
    try:
        return float(read_json(done)["time"])
    except (DataError, KeyError, TypeError, ValueError):
        return math.inf
