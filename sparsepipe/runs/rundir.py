"""Run directories, named by a run's identity, so that the same run is never done twice.

``outputs/<experiment>/<run id>/`` holds ``config.yaml``, ``metrics.csv``, ``result.json``,
checkpoints and pictures; ``DONE.json`` is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import DataError, OutputError
from sparsepipe.utils.files import expanded, free_name, read_json, write_json, write_text_atomic

_LOGGED = ("wandb", "mlflow", "tensorboard")
"""Subdirectories to which trackers write."""
_STARTS = ".starts"


class _InRun:
    """An attribute of :class:`RunDir` with the path of a file in the run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's directory and the paths of its files."""

    path: Path

    config = _InRun("config.yaml")
    metrics = _InRun("metrics.csv")
    """The metrics, one row for each epoch."""
    result = _InRun("result.json")
    plan = _InRun("plan.json")
    """The plan by which a pipeline splits the network; written before ranks start if a search finds
    it, else at the first training step."""
    plan_table = _InRun("plan.txt")
    """The plan of a search, as a table to read."""
    plan_figures = _InRun("plan.csv")
    """The plan of a search, with the expected times and memory of each stage."""
    shares = _InRun("shares.png")
    """A picture of costs accumulated over the layers, with the cuts of the plan of a search."""
    confusion = _InRun("confusion.csv")
    """Counts of test shapes by true and predicted class."""
    cases = _InRun("cases.csv")
    """Scores of each class in each case of a test on volumes, the worst case first."""
    predictions = _InRun("predictions.csv")
    """The predicted class of each sample of a test, or of each file of ``task=predict``."""
    predictions_json = _InRun("predictions.json")
    """The predicted classes of files, and the errors of unreadable ones."""
    gallery = _InRun("predictions.png")
    """A picture of some samples or files with their predicted classes."""
    first_weights = _InRun("first_weights.csv")
    """Which tensors a training has loaded from ``checkpoint``, and which it has not."""
    done = _InRun("DONE.json")
    """Exists once the run is finished."""
    checkpoints = _InRun("checkpoints")
    last = _InRun("checkpoints/last.ckpt")
    """The checkpoint to resume from."""
    best = _InRun("checkpoints/best.ckpt")
    """The checkpoint of the epoch with the best value of the monitored metric."""
    fitted = _InRun("checkpoints/fitted.json")
    """Values for ``result.json``, written when a training has reached its end."""

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def kept_checkpoint(self) -> Path | None:
        """The best checkpoint, else the last one; None if neither was kept."""
        return next((path for path in (self.best, self.last) if path.is_file()), None)

    @property
    def starts(self) -> tuple[float, ...]:
        """Unix times at which the run was begun or continued."""
        try:
            return tuple(read_json(self.path / _STARTS))
        except (DataError, TypeError):
            return ()

    @property
    def attempt(self) -> int:
        """Number of times that the run was started anew with ``force=true``."""
        try:
            return int(self._attempts.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    @property
    def _attempts(self) -> Path:
        return self.path.with_name(f".{self.run_id}.attempt")

    def open(self, spec: RunSpec) -> None:
        """Makes the directory and config; ``spec.force`` first removes all but trackers' files."""
        again = bool(spec.force) and self.path.exists()
        if attempt := self.attempt + again:
            write_text_atomic(self._attempts, str(attempt))  # first, so that a kill cannot lose it
        if again:
            # Moved first: a directory that is half removed must not look like a run.
            self.path.rename(self.path.with_name(f".{self.run_id}.{os.getpid()}.{time.time_ns()}"))
        for aside in self.path.parent.glob(f".{self.run_id}.[0-9]*.[0-9]*"):
            for name in _LOGGED:
                kept = self.path / f"{name}-earlier"
                for logged in (*aside.glob(f"{name}-earlier/*"), *aside.glob(name)):
                    kept.mkdir(parents=True, exist_ok=True)
                    logged.rename(free_name(kept / logged.name))
            shutil.rmtree(aside)  # also those that killed processes have left
        self.path.mkdir(parents=True, exist_ok=True)
        # Before config.yaml, by which a directory counts as a run's.
        write_json(self.path / _STARTS, [*self.starts, time.time()])
        write_text_atomic(self.config, spec.to_yaml())

    def remove_if_unused(self) -> None:
        """Removes the directory, after a failure, if it has no more than configuration and plan."""
        plan = (self.plan, self.plan_table, self.plan_figures, self.shares)
        unused = {self.config.name, _STARTS, *(path.name for path in plan)}
        if self.path.is_dir() and {path.name for path in self.path.iterdir()} <= unused:
            shutil.rmtree(self.path)

    def check_open(self) -> None:
        """Raises an OutputError if the run's directory was removed or moved since :meth:`open`."""
        if not self.config.exists():
            raise OutputError(
                f"{self.path} was removed or moved while the run was writing to it",
                remedy="run the same command again, and leave the directory where it is until the "
                "run has finished",
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as finished; raises an OutputError as :meth:`check_open` does."""
        self.check_open()
        write_json(self.done, dict(summary))


def run_dir(spec: RunSpec, known: Mapping[str, Any]) -> RunDir:
    """The directory of the run of ``spec``, whose name is a hash of the run's identity.

    Args:
        spec: the configuration.
        known: further parts of the identity, such as fingerprints of data and hardware.
    """
    text = json.dumps({**spec.identity(), **known}, sort_keys=True, default=str)
    run_id = hashlib.sha256(text.encode()).hexdigest()[:12]
    return RunDir((expanded(spec.paths.outputs) / str(spec.name)).absolute() / run_id)


def file_fingerprint(path: Path) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def moment(time_s: float) -> str:
    """A Unix time as ISO 8601 text, in UTC and to the second."""
    return datetime.fromtimestamp(time_s, tz=UTC).isoformat(timespec="seconds")
