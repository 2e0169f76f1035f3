"""Says with an error where it happened."""

from __future__ import annotations

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.errors import SparsePipeError
from sparsepipe.strategies import StagedStrategy
from sparsepipe.strategies.trainer_internals import evaluation_loop


class NamePlace(pl.Callback):
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
            batch = evaluation_loop(trainer).batch_progress.current.ready
        else:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        exception.add_note(f"{stage}{doing} epoch {trainer.current_epoch + 1}, batch {batch}")
