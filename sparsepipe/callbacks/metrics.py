"""Writes a training's metrics and learning rate to a file; resumes sums within an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from typing_extensions import override

from sparsepipe.runs.metrics import read_rows, write_rows
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.metrics import State, merged_states, set_state, state_of
from sparsepipe.strategies.trainer_internals import (
    LoggedValue,
    drop_computed,
    optimizer_steps,
    training_values,
)


class MetricsCsv(pl.Callback):
    """Writes each epoch's metrics and learning rate (of the first parameter group) to a CSV file.

    A row is on disk before the checkpoint of its epoch. When a run resumes, rows of epochs that
    the checkpoint does not include are dropped, since these epochs run again. Loggers get the
    learning rate too: Lightning's own monitor logs it at an epoch's start, and thus not in a run
    that resumes within the epoch.

    Args:
        path: the CSV file.
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
        # Lightning still holds the values of an earlier epoch's validation.
        fresh, self._validated = self._validated, False
        row.update({k: v for k, v in values.items() if fresh or not k.startswith("val/")})
        if trainer.optimizers:
            row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self._rows.append(row)
        write_rows(self._path, self._rows)
        for logger in trainer.loggers if "lr" in row else ():
            rate = {name: row[name] for name in ("lr", "epoch")}
            logger.log_metrics(rate, step=optimizer_steps(trainer) - 1)


def epoch_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Returns the epoch's metrics by name; collective, since their computation may be."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # Besides ``name_epoch`` Lightning keeps the last step's value, as ``name`` and ``name_step``.
    return {
        name.removesuffix("_epoch"): value
        for name, value in values.items()
        if not name.endswith("_step") and f"{name}_epoch" not in values
    }


def mean_over_ranks(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Returns the mean over the ranks of each value that all of them have; collective."""
    everyone = process_group.gather_objects({name: float(value) for name, value in values.items()})
    return {
        name: sum(rank[name] for rank in everyone) / len(everyone)
        for name in everyone[0]
        if all(name in rank for rank in everyone)
    }


log = logging.getLogger(__name__)

_KEY = "epoch_sums"
_HOOK = "training_step"

Sums = dict[str, State]
"""State of each logged value, by Lightning's key for it."""


class EpochSums(pl.Callback):
    """Makes ``train/loss``, ``train/accuracy`` and the like cover the whole epoch.

    Lightning resets them when a run resumes within an epoch. Checkpoints written within an epoch
    therefore hold each rank's sums of the numbers and torchmetrics that ``training_step`` logs per
    epoch, and the epoch's end adds those of the later batches. So this callback must precede all
    that read metrics. Metrics that cannot be merged lack the first batches, with a warning.
    """

    def __init__(self) -> None:
        self._before: Sums = {}
        self._ended = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        mine: Sums = {}
        if not self._ended:
            mine = {key: whole for key, _, _, whole in self._of_epoch(trainer)}
        checkpoint[_KEY] = process_group.gather_objects(mine)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        everyone = checkpoint.get(_KEY, [])
        if len(everyone) == process_group.world_size():
            self._before = everyone[process_group.rank()]

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not called if an earlier process began the epoch.
        self._before, self._ended = {}, False

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for key, item, summed, whole in self._of_epoch(trainer):
            if key in self._before:
                set_state(summed, whole)
                drop_computed(item)
        self._before, self._ended = {}, True

    def _of_epoch(self, trainer: pl.Trainer) -> Iterator[tuple[str, LoggedValue, Any, State]]:
        """Yields, for each value that training steps log per epoch, its key, Lightning's entry, the
        object with its sums (this entry for a number, else the module's metric), and their state
        over the whole epoch. A metric that is logged under two names is yielded once.
        """
        seen: set[int] = set()
        for key, item in training_values(trainer).items():
            summed: Any = item if item.is_tensor else item.value
            if item.meta.fx != _HOOK or not item.meta.on_epoch or id(summed) in seen:
                continue
            seen.add(id(summed))
            mine, before = state_of(summed), self._before.get(key)
            whole: State | None = mine
            if before is not None and not item.is_tensor:
                whole = merged_states(item.value, [before, mine])
            elif before is not None:
                whole = {name: before[name] + mine[name] for name in mine}
                if item.meta.is_max_reduction or item.meta.is_min_reduction:
                    whole["value"] = item.meta.reduce_fx(before["value"], mine["value"])
            if whole is None:
                log.warning(
                    "%s of this epoch lacks the batches before the stop: a %s cannot be merged",
                    item.meta.name,
                    type(item.value).__name__,
                )
            yield key, item, summed, mine if whole is None else whole
