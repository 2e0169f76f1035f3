"""How far a running job is, by what it has left so far."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepipe.errors import DataError
from sparsepipe.experiment.sweep.record import SweptJob
from sparsepipe.results.files import read_json

_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What a job is about.

    Args:
        stage: ``prepares`` (its data are made ready), or of its run's directory
            (:data:`sparsepipe.experiment.job.Stage`).
        for_s: since when, in seconds before now.
    """

    stage: str
    for_s: float

    @property
    def works(self) -> bool:
        """Whether it is at its own run, and not at what others need as well, or waits for."""
        return self.stage not in ("prepares", "waits")


def doing(job: SweptJob) -> Doing | None:
    """As a job has told last; None where it has told nothing."""
    try:
        told = read_json(job.started)
        return Doing(stage=told["stage"], for_s=max(0.0, time.time() - float(told["since_s"])))
    except (DataError, KeyError, TypeError, ValueError):
        return None


def working_s(now: Doing | None, *, elapsed_s: float, wait_limit_s: float | None) -> float:
    """How long a job has worked, for its limit: since its data are ready and its run is its own.

    Until then it does, or waits for, what other jobs and other sweeps need as well: the first one
    builds a cache, and others wait for that. Nor is this to last without end.

    Args:
        now: what it is about.
        elapsed_s: since it began.
        wait_limit_s: how long such a thing may take before it counts; None: as long as it likes.
    """
    if now is None:
        return elapsed_s
    if now.works:
        return now.for_s
    return 0.0 if wait_limit_s is None else max(0.0, now.for_s - wait_limit_s)


def epochs_done(job: SweptJob) -> int | None:
    """Epochs of a training so far, those of former attempts too; None of another task."""
    run = _run_of(job)
    return None if run is None else _epochs_of(run)


def epochs_found(job: SweptJob) -> int | None:
    """Epochs that a run has as soon as a job has found it: 0 of a fresh one; None until then."""
    run = _run_of(job)
    return None if run is None else _epochs_of(run) or 0


def _run_of(job: SweptJob) -> Path | None:
    try:
        return Path(read_json(job.started)["run"])
    except (DataError, KeyError):
        return None


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
