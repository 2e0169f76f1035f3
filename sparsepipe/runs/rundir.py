"""Run directories: named by what a run is, so that the same run is never done twice.

``outputs/<experiment>/<run id>/`` holds ``config.yaml``, ``metrics.csv``, ``result.json``,
checkpoints and figures; ``DONE.json`` is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import DataError
from sparsepipe.utils.files import expanded, free_name, read_json, write_json, write_text_atomic

_LOGGED = ("wandb", "mlflow", "tensorboard")
"""Directories of trackers."""
_ATTEMPT, _STARTS = ".attempt", ".starts"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run's directory and the paths of its files."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One row for each epoch."""
        return self.path / "metrics.csv"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def plan(self) -> Path:
        """The plan by which a pipeline splits the network; written at the first training step."""
        return self.path / "plan.json"

    @property
    def plan_table(self) -> Path:
        """A plan that was searched for, as a table to read."""
        return self.path / "plan.txt"

    @property
    def plan_figures(self) -> Path:
        """A plan that was searched for, with what to expect of each stage."""
        return self.path / "plan.csv"

    @property
    def shares(self) -> Path:
        """Accumulated costs over the layers, with the cuts of a plan that was searched for."""
        return self.path / "shares.png"

    @property
    def confusion(self) -> Path:
        """Counts of test shapes by true and predicted class."""
        return self.path / "confusion.csv"

    @property
    def predictions(self) -> Path:
        """The predicted class of each sample of a test, or of each file that was given."""
        return self.path / "predictions.csv"

    @property
    def predictions_json(self) -> Path:
        """The same of files, with their faults."""
        return self.path / "predictions.json"

    @property
    def gallery(self) -> Path:
        """Pictures of some of these."""
        return self.path / "predictions.png"

    @property
    def first_weights(self) -> Path:
        """What a training took from ``checkpoint``, and what it left, tensor by tensor."""
        return self.path / "first_weights.csv"

    @property
    def done(self) -> Path:
        """Exists once the run is finished."""
        return self.path / "DONE.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.checkpoints / "last.ckpt"

    @property
    def best(self) -> Path:
        """The checkpoint with the best monitored metric."""
        return self.checkpoints / "best.ckpt"

    @property
    def kept_checkpoint(self) -> Path | None:
        """The best checkpoint, else the last one; None where neither is kept."""
        return next((path for path in (self.best, self.last) if path.is_file()), None)

    @property
    def fitted(self) -> Path:
        """Written when training has ended by itself: its values."""
        return self.checkpoints / "fitted.json"

    @property
    def starts(self) -> tuple[float | None, ...]:
        """When the run was begun and gone on with, as Unix times.

        The first is None where a version began it that did not note that.
        """
        try:
            return tuple(read_json(self.path / _STARTS))
        except (DataError, TypeError):
            return (None,) if self.config.exists() else ()

    @property
    def attempt(self) -> int:
        """How often the run was started anew by force."""
        for file in (self._attempts, self.path / _ATTEMPT):  # where older versions have it
            try:
                return int(file.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
        return 0

    @property
    def _attempts(self) -> Path:
        return self.path.with_name(f".{self.run_id}{_ATTEMPT}")

    def open(self, spec: RunSpec) -> None:
        """Makes the directory ready for a run, anew where ``force`` is set."""
        again = bool(spec.force) and self.path.exists()
        if attempt := self.attempt + again:
            write_text_atomic(self._attempts, str(attempt))  # first: nothing may come between
        if again:
            # Moved first: a directory that is half removed must not look like a run.
            self.path.rename(self.path.with_name(f".{self.run_id}.{os.getpid()}.{time.time_ns()}"))
        for aside in self.path.parent.glob(f".{self.run_id}.[0-9]*.[0-9]*"):
            self._keep_logged(aside)
            shutil.rmtree(aside)  # one that was killed may have left its own
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(
            self.path / _STARTS, [*self.starts, time.time()]
        )  # before there is a config.yaml
        write_text_atomic(self.config, spec.to_yaml())

    def _keep_logged(self, aside: Path) -> None:
        for name in _LOGGED:
            kept = self.path / f"{name}-earlier"
            for logged in (*aside.glob(f"{name}-earlier/*"), *aside.glob(name)):
                kept.mkdir(parents=True, exist_ok=True)
                logged.rename(free_name(kept / logged.name))

    def remove_if_unused(self) -> None:
        """Removes the directory of a run that failed before it had anything to keep."""
        plan = (self.plan, self.plan_table, self.plan_figures, self.shares)
        unused = {self.config.name, _ATTEMPT, _STARTS, *(path.name for path in plan)}
        if {path.name for path in self.path.iterdir()} <= unused:
            shutil.rmtree(self.path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_json(self.done, dict(summary))


def run_dir(spec: RunSpec, known: Mapping[str, Any]) -> RunDir:
    """The directory that belongs to a configuration on some data and hardware.

    Args:
        spec: the configuration.
        known: what else the run's identity depends on, such as fingerprints.
    """
    text = json.dumps({**spec.identity(), **known}, sort_keys=True, default=str)
    run_id = hashlib.sha256(text.encode()).hexdigest()[:12]
    return RunDir((expanded(spec.paths.outputs) / str(spec.name)).absolute() / run_id)


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file's content, shortened."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]
