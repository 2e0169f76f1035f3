"""The learning rate, for trackers."""

from __future__ import annotations

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.strategies.trainer_internals import optimizer_steps


class LogRates(pl.Callback):
    """Logs ``lr`` at each epoch's end, as the metrics file has it, to whatever logger there is.

    Lightning's own monitor does so at an epoch's start, which a run that goes on in the middle
    of an epoch does not come by.
    """

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.optimizers or not trainer.is_global_zero:
            return
        row = {"lr": trainer.optimizers[0].param_groups[0]["lr"], "epoch": trainer.current_epoch}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=optimizer_steps(trainer) - 1)
