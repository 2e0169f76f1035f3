"""Writes a run's plan, and checkpoints from which it resumes as if it had never stopped."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor
from typing_extensions import override

from sparsepipe.callbacks.finite import FiniteOnly
from sparsepipe.callbacks.resumable_loading import STATE_KEY, ResumableLoaders, Resume
from sparsepipe.config.finished_run import RECORD
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.setting import bounds_of, with_spans
from sparsepipe.runs.randomness import get_randomness
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.strategies import StagedStrategy
from sparsepipe.strategies.pipeline.dataloaders import has_state
from sparsepipe.strategies.trainer_internals import optimizer_steps
from sparsepipe.utils.files import write_text_atomic, writing

log = logging.getLogger(__name__)


class RunCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` after epochs and in :meth:`save`, ``best.ckpt`` when a metric improves.

    A file is replaced only once the new one is complete. Every rank takes part; rank 0 writes.

    Args:
        directory: the run's directory.
        monitor: name of the metric for ``best.ckpt``; None: ``val/mean_iou`` if it is logged, as
            with labels of voxels or points, else ``val/accuracy``.
        mode: ``max`` or ``min``: whether the highest or the lowest value is best.
        resume: where this run resumes; None: it starts anew.
        record: plain values that describe what is trained, stored in every checkpoint.
        loaders: callback that holds the training's loaders.
        finite: callback that looks at the weights; weights that are not finite are never the best.

    Attributes:
        finite: the given callback; without one, one that never finds anything.
        monitor: name of the metric for ``best.ckpt``.
        best: the metric's best value so far; None: there is no value yet.
    """

    state_key = STATE_KEY

    def __init__(
        self,
        directory: RunDir,
        *,
        monitor: str | None,
        mode: str,
        resume: Resume | None,
        loaders: ResumableLoaders,
        finite: FiniteOnly | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory, self._record = directory, dict(record or {})
        self._is_open = directory.config.exists()
        self.monitor = monitor or "val/accuracy"
        self._is_monitor_given = monitor is not None
        self._validated = False
        self._sign = 1.0 if mode == "max" else -1.0
        self.best: float | None = None
        self._resume, self._loaders, self.finite = resume, loaders, finite or FiniteOnly()
        self._loader_states: list[Any] = []
        self._position = (0, 0, 0)
        self._metrics: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resume is None:
            return
        # Lightning does not restore the metrics of a validation within the epoch.
        trainer.callback_metrics.update(self._resume.metrics)
        own = self._resume.of_rank(self._resume.buffers) or {}
        with torch.no_grad():
            for name, buffer in pl_module.named_buffers():
                if name in own and own[name].shape == buffer.shape:
                    buffer.copy_(own[name])
        self._resume = None

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wanted = "val/mean_iou"
        is_new = wanted in trainer.callback_metrics and self.monitor != wanted
        if is_new and not self._is_monitor_given:
            self.monitor, self.best = wanted, None  # older versions went on with val/accuracy
        value = trainer.callback_metrics.get(self.monitor)
        every = trainer.check_val_every_n_epoch
        due = every is None or (trainer.current_epoch + 1) % every == 0
        # A validation without batches counts too: it will never log anything.
        was_validated = self._validated or (due and not any(trainer.num_val_batches))
        if value is None and self._is_monitor_given and was_validated:
            logged = [name for name in trainer.callback_metrics if not name.endswith("_step")]
            names = sorted({name.removesuffix("_epoch") for name in logged})
            raise ConfigError(
                f"task.monitor={self.monitor} is not logged; logged: {', '.join(names) or 'none'}",
                remedy="name one of the logged metrics, or set task.monitor=null",
            )
        # Rank 0 decides: ranks must agree, but their metrics may differ in the last bit.
        better = (
            value is not None
            and math.isfinite(value)
            and self.finite.weights_are_finite
            and (self.best is None or self._sign * float(value) > self._sign * self.best)
        )
        improved = process_group.broadcast_object(better)
        if improved:
            assert value is not None
            self.best = float(value)
        if getattr(trainer, "fast_dev_run", False):
            return
        self.save(trainer, epoch=trainer.current_epoch + 1, batches=0, best=improved)

    def save(self, trainer: pl.Trainer, *, epoch: int, batches: int, best: bool = False) -> None:
        """Writes ``last.ckpt``, and ``best.ckpt`` too if ``best``; every rank must call it.

        The run resumes in ``epoch`` (from 0) after its first ``batches``. If a loader cannot resume
        within the epoch, ``last.ckpt`` stays that of the epoch's start.
        """
        several = batches and trainer.world_size > 1
        staged = trainer.strategy if isinstance(trainer.strategy, StagedStrategy) else None
        in_flight = several and staged is not None and not staged.is_synchronous
        # A checkpoint averages buffers over the ranks, which go on with their own.
        named = trainer.lightning_module.named_buffers() if several and not in_flight else ()
        self._buffers = {name: buffer.detach().cpu().clone() for name, buffer in named}
        if batches and staged is not None:
            staged.drain()  # first: a replica may still wait for another's share of an update
        found = process_group.gather_objects(self._loaders.obstacle) if batches else []
        if obstacle := next(filter(None, found), None):
            if trainer.is_global_zero:
                log.warning(
                    "if resumed, the run will repeat epoch %d from its beginning, since %s; to "
                    "resume within an epoch, use a DataLoader of a map-style data set, or a loader "
                    "with state_dict and load_state_dict",
                    epoch + 1,
                    obstacle,
                )
            return
        if in_flight and trainer.is_global_zero:
            log.warning(
                "for the checkpoint, the asynchronous pipeline has finished the minibatches in "
                "flight: weights from here on differ from those of a training without this stop"
            )
        # Within an epoch Lightning has not counted the last batch yet.
        steps = optimizer_steps(trainer) + bool(batches)
        self._position = (epoch, batches, steps)
        loaders = self._loaders.loaders if batches else []
        self._loader_states = [each.state_dict() if has_state(each) else None for each in loaders]
        self._metrics = {
            name: value.detach().cpu().clone()
            for name, value in trainer.callback_metrics.items()
            if batches and not name.startswith("train/")
        }
        last = self._directory.last
        partial = last.with_name(f".{last.name}.tmp")
        if self._is_open and trainer.is_global_zero:
            self._directory.check_open()  # else the folder would be made anew, without the rest
        with writing(last.parent):
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                with partial.open("rb+") as stream:
                    os.fsync(stream.fileno())
                if best:  # first: a run killed in between repeats the epoch
                    second = self._directory.best.with_name(f".{self._directory.best.name}.tmp")
                    second.unlink(missing_ok=True)
                    try:  # a hard link: checkpoints are replaced, never modified
                        os.link(partial, second)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(partial, second)
                    second.replace(self._directory.best)
                partial.replace(last)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[RECORD] = self._record

    @override
    def state_dict(self) -> dict[str, Any]:
        epoch, batches, steps = self._position
        return {
            "epoch": epoch,
            "batches": batches,
            "steps": steps,
            "best": self.best,
            "monitor": self.monitor,
            "metrics": self._metrics,
            "randomness": process_group.gather_objects(get_randomness()),
            "loaders": process_group.gather_objects(self._loader_states),
            "buffers": process_group.gather_objects(self._buffers, everywhere=False),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]  # NaN in files of older versions, which nothing would exceed
        self.best = best if best is not None and math.isfinite(best) else None
        self.monitor = state_dict.get("monitor", self.monitor)


_LOGGED = ("strategy", "bottleneck_s", "bottleneck", "dp_s", "stage_times_s", "transfer_times_s")
"""Entries of a plan file that loggers get as hyperparameters, if it has them."""


class KeepPlan(pl.Callback):
    """Writes the plan file, if the run has none yet, when a pipeline begins to train.

    The file's entry ``recomputed`` lists recomputed spans of layers, if any. Loggers get the plan
    as hyperparameters, with the times that the plan's search expected, if there was a search.

    Args:
        directory: the run's directory.
        devices: name of each rank's device, in the order of ranks.
        details: further entries for the plan file, such as times expected by a search.
    """

    def __init__(
        self, directory: RunDir, devices: Sequence[str], details: Mapping[str, Any]
    ) -> None:
        self._directory, self._devices, self._details = directory, devices, details

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, path = trainer.strategy, self._directory.plan
        if not isinstance(strategy, StagedStrategy) or not trainer.is_global_zero:
            return
        if not path.exists():
            with writing(path):
                names = iter(self._devices)
                stages = (
                    replace(stage, devices=tuple(islice(names, len(stage.devices))))
                    for stage in strategy.plan.stages
                )
                plan = replace(strategy.plan, details=self._details, stages=tuple(stages))
                plan = with_spans(plan, strategy.recomputed)
                write_text_atomic(path, plan.to_json())
        kept = Plan.load(path)
        details = {name: kept.details[name] for name in _LOGGED if name in kept.details}
        if spans := bounds_of(strategy.recomputed):
            details["recomputed"] = spans
        hyperparameters = {"config": kept.config, "cuts": list(kept.cuts), **details}
        for logger in trainer.loggers:
            logger.log_hyperparams({"plan": hyperparameters})
