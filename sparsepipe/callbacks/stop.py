"""Stops a training when a signal comes, and adds to errors where they were raised."""

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
from sparsepipe.strategies.trainer_internals import active_loop, log_step_metrics


class StopOnSignal(pl.Callback):
    """Stops all ranks after the same step, with a checkpoint of it.

    During validation ranks do not check for signals, since they may see unequal numbers of
    batches; the epoch's end follows.

    Args:
        watch: notes the signals.
        checkpoint: writes the checkpoint; None: a signal ends training where it arrives, without
            one.
    """

    def __init__(self, watch: SignalWatch, checkpoint: RunCheckpoint | None) -> None:
        self._watch, self._checkpoint = watch, checkpoint
        self._agreement: StopAgreement | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning has put its own handler in place of ours by now.
        self._watch.install()
        self._watch.deferred = self._checkpoint is not None
        if isinstance(trainer.strategy, StagedStrategy):
            self._agreement = StopAgreement(spread=2 * trainer.world_size)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._checkpoint is None or trainer.is_last_batch:
            return  # the epoch's end is near and leaves the better checkpoint
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # a checkpoint does not hold gradients
        if isinstance(every := trainer.val_check_batch, int):
            across_epochs = trainer.check_val_every_n_epoch is None
            done = trainer.fit_loop.epoch_loop.total_batch_idx if across_epochs else batch_idx
            if (done + 1) % every == 0:
                return  # Lightning would leave out the validation when the run goes on
        own = self._watch.signum or 0
        if self._agreement is None:
            signum = process_group.highest(own)
        else:  # ranks of a pipeline are some steps apart, and must not wait for each other
            stops = self._agreement.reached(trainer.global_step, requested=own != 0, reason=own)
            signum = self._agreement.reason if stops else 0
        if signum:
            if trainer.loggers:  # which get the step's values, as when Lightning comes back
                log_step_metrics(trainer)
            self._checkpoint.save(trainer, epoch=trainer.current_epoch, batches=batch_idx + 1)
            raise Stopped(signum)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here, not at the epoch's end: its checkpoint is written by then.
        if self._checkpoint is not None:
            stop_if_requested(self._watch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.deferred = False  # the task checks once more, after it has recorded the end

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch.install()


def stop_if_requested(watch: SignalWatch) -> None:
    """Stops every rank by :class:`Stopped` where a signal has come to one; all ranks call it."""
    if signum := process_group.highest(watch.signum or 0):
        raise Stopped(signum)


class ErrorNotes(pl.Callback):
    """Adds stage and batch as a note to what a rank raises, unless something closer has."""

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
