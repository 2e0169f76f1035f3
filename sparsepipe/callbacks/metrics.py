"""Writes a training's metrics and learning rate to a file; resumes sums within an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from sparsepipe.runs.metrics import read_rows, write_rows
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.metrics import (
    State,
    last_result,
    set_last_result,
    set_state,
    state_of,
    updated_states,
)
from sparsepipe.strategies.trainer_internals import (
    optimizer_steps,
    options_of,
    restore_logged,
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


class EpochSums(pl.Callback):
    """Makes ``train/loss``, ``train/accuracy`` and the like cover the whole epoch.

    Lightning resets them when a run resumes within an epoch. Checkpoints written within an epoch
    therefore hold each rank's own sums of what is logged in training, and the states of the
    module's torchmetrics. A resumed run goes on from these, with the bits of an uninterrupted one.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}
        self._ended = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        values = []
        for key, item in ({} if self._ended else training_values(trainer)).items():
            if item.has_reset:
                continue
            if (options := options_of(item)) is None:
                log.warning(
                    "if resumed, %s of this epoch lacks the batches before the stop, since it is "
                    "logged with a sync_dist_group",
                    item.meta.name,
                )
                continue
            last = last_result(item)
            values.append((key, options, state_of(item), None if last is None else last.cpu()))
        pipeline: Any = getattr(trainer.strategy, "pipeline", None)
        own = {} if pipeline is None else pipeline.own_metrics
        checkpoint[_KEY] = process_group.gather_objects(
            {}
            if self._ended
            else {"values": values, "metrics": updated_states(pl_module), "own": own}
        )

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
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        before, self._before = self._before, {}
        if "metrics" not in before:  # as in checkpoints of older versions
            return
        states: Mapping[str, State] = before["metrics"]
        if (pipeline := getattr(trainer.strategy, "pipeline", None)) is not None:
            pipeline.restore_metrics(states, before.get("own", {}))
        else:
            for name, state in states.items():
                set_state(cast(Metric, pl_module.get_submodule(name)), state)
        for key, options, state, last in before["values"]:
            item = restore_logged(trainer, key, options).to(pl_module.device)
            set_state(item, state)
            set_last_result(item, None if last is None else last.to(pl_module.device))
            if not item.is_tensor:
                item.value = pl_module.get_submodule(cast(str, item.meta.metric_attribute))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ended = True
