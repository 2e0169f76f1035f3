"""How far a running job is, by what it has left so far."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsepipe.sweep.record import SweptJob
from sparsepipe.sweep.stages import doing

_TAIL_BYTES = 16_384


def epochs_done(job: SweptJob) -> int | None:
    """Epochs of a training so far, those of former attempts too; None of another task."""
    run = _run_of(job)
    return None if run is None else _epochs_of(run)


def epochs_found(job: SweptJob) -> int | None:
    """Epochs that a run has as soon as a job has found it: 0 of a fresh one; None until then."""
    run = _run_of(job)
    return None if run is None else _epochs_of(run) or 0


def _run_of(job: SweptJob) -> Path | None:
    now = doing(job)
    return None if now is None or now.run is None else Path(now.run)


def _epochs_of(run: Path) -> int | None:
    try:
        with (run / "metrics.csv").open(encoding="utf-8") as stream:
            return max(0, sum(1 for line in stream if line.strip()) - 1)  # but the heading
    except OSError:  # which it writes when its first epoch is over
        return None


def epochs_in_all(config: Mapping[str, Any]) -> int | None:
    """How many a training is to have; None where that is not said in epochs."""
    epochs = config["trainer"]["max_epochs"]
    return epochs if isinstance(epochs, int) and epochs > 0 else None


def tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a log, without those that are empty."""
    try:
        with path.open("rb") as stream:
            size_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size_bytes - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar writes its states over one another.
    said = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in said if line][-lines:]
