"""``metrics.csv``: one row an epoch, the same after a run was interrupted and resumed."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from typing_extensions import override

from sparsepipe.runs.metrics import read_metrics
from sparsepipe.runtime.collectives import process_group
from sparsepipe.utils.files import write_text_atomic

_KEYS = ("epoch", "step")


class MetricsCsv(pl.Callback):
    """Writes every epoch's metrics, and the learning rate, as one row.

    A row is on the disk before the checkpoint of its epoch is; when a run resumes, rows
    of epochs that its checkpoint does not include are dropped, since they come again.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._validated = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            rows = read_rows(self._path)
            self._rows = [row for row in rows if int(row["epoch"]) < trainer.current_epoch]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validated": self._validated}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated = state_dict["validated"]

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = mean_over_ranks(epoch_metrics(trainer))
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        row: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        # Lightning goes on showing the values of an earlier epoch's validation.
        fresh, self._validated = self._validated, False
        row.update({k: v for k, v in values.items() if fresh or not k.startswith("val/")})
        if trainer.optimizers:
            row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self._rows.append(row)
        write_rows(self._path, self._rows)


def add_to_last_row(path: Path, values: Mapping[str, float]) -> None:
    """Adds columns, such as the final test's, to the last epoch's row."""
    rows = read_rows(path)
    if rows:
        rows[-1].update(values)
        write_rows(path, rows)


def epoch_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """The epoch's metrics as numbers; every rank must ask, since metrics synchronise."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # Lightning keeps the last step's value beside the epoch's under such names.
    return {
        name.removesuffix("_epoch"): value
        for name, value in values.items()
        if not name.endswith("_step") and f"{name}_epoch" not in values
    }


def mean_over_ranks(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Means of each rank's numbers; those that are synchronised already stay as they are."""
    everyone = process_group.gather_objects({name: float(value) for name, value in values.items()})
    return {
        name: sum(rank[name] for rank in everyone) / len(everyone)
        for name in everyone[0]
        if all(name in rank for rank in everyone)
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; none if there is no file."""
    return read_metrics(path) if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows under the union of their columns, epoch and step first."""
    names = sorted({name for row in rows for name in row} - set(_KEYS))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[*_KEYS, *names], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(path, text.getvalue())
