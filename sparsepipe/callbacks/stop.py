"""Stops training when a signal arrives; adds to errors where in the run they were raised."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.callbacks.checkpoint import RunCheckpoint
from sparsepipe.errors import SparsePipeError
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.stop_agreement import StopAgreement
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.strategies import StagedStrategy
from sparsepipe.strategies.trainer_internals import active_loop, log_step_metrics, logging_hook


class StopOnSignal(pl.Callback):
    """When a signal arrives, writes a checkpoint and stops all ranks after the same step.

    Ranks check for signals after a step and at an epoch's start, but not during a validation, in
    which their numbers of batches may differ.

    Args:
        watch: records the signals that have arrived.
        checkpoint: callback that writes the checkpoint; None: a signal ends training at once,
            without a checkpoint.
    """

    def __init__(self, watch: SignalWatch, checkpoint: RunCheckpoint | None) -> None:
        self._watch, self._checkpoint = watch, checkpoint
        self._agreement: StopAgreement | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # By now Lightning has replaced our handler with its own.
        self._watch.install()
        self._watch.deferred = self._checkpoint is not None
        if isinstance(trainer.strategy, StagedStrategy):
            self._agreement = StopAgreement(spread=2 * trainer.world_size)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._checkpoint is None or trainer.is_last_batch:
            return  # the epoch's end follows, with a better checkpoint
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # a checkpoint does not hold accumulated gradients
        if isinstance(every := trainer.val_check_batch, int):
            across_epochs = trainer.check_val_every_n_epoch is None
            done = trainer.fit_loop.epoch_loop.total_batch_idx if across_epochs else batch_idx
            if (done + 1) % every == 0:
                return  # when resumed, Lightning would skip the validation
        own = self._watch.signum or 0
        if self._agreement is None:
            signum = process_group.highest(own)
        else:  # ranks of a pipeline are some steps apart and must not wait for each other
            stops = self._agreement.reached(trainer.global_step, requested=own != 0, reason=own)
            signum = self._agreement.reason if stops else 0
        if signum:
            # Lightning would do all this after this hook, first the module's own hook.
            with logging_hook(pl_module, "on_train_batch_end"):
                pl_module.on_train_batch_end(outputs, batch, batch_idx)
            if trainer.loggers:
                log_step_metrics(trainer)
            trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._checkpoint.save(trainer, epoch=trainer.current_epoch, batches=batch_idx + 1)
            raise Stopped(signum)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here, not at the last epoch's end, so that its checkpoint has been written.
        if self._checkpoint is not None:
            stop_if_requested(self._watch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.deferred = False  # the task checks once more, after it has recorded the end

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.install()


def stop_if_requested(watch: SignalWatch) -> None:
    """Raises :class:`Stopped` on all ranks if any has got a signal; every rank must call it."""
    if signum := process_group.highest(watch.signum or 0):
        raise Stopped(signum)


class ErrorNotes(pl.Callback):
    """Adds a note (stage, epoch and batch) to exceptions that are not SparsePipeErrors."""

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SparsePipeError) or hasattr(exception, "__notes__"):
            return
        stage = ""
        if isinstance(trainer.strategy, StagedStrategy) and trainer.strategy.pipeline:
            stage = f"stage {trainer.strategy.plan.stage_of(trainer.global_rank)}: "
        doing = "" if trainer.state.stage is None else trainer.state.stage.value
        if trainer.validating or trainer.sanity_checking or trainer.testing:
            batch = active_loop(trainer).batch_progress.current.ready
        else:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        exception.add_note(f"{stage}{doing} epoch {trainer.current_epoch + 1}, batch {batch}")
