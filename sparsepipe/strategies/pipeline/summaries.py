"""Summaries of a module, made while each rank has all of it."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelSummary

from sparsepipe.strategies.pipeline.whereabouts import device_told


class EarlySummaries:
    """Lets callbacks summarise a module now, and not again when the fit starts.

    Then layers of other stages are gone: their parameters would not be counted, and no
    example could run through them.

    Args:
        trainer: has the callbacks.
        module: the LightningModule, whole.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._told = [callback for callback in callbacks if isinstance(callback, ModelSummary)]
        with device_told(module):
            for callback in self._told:
                callback.on_fit_start(trainer, module)
        for callback in self._told:
            callback.on_fit_start = _nothing  # type: ignore[method-assign]

    def undo(self) -> None:
        """The next fit is summarised as any other."""
        for callback in self._told:
            del callback.on_fit_start


def _nothing(trainer: Any, pl_module: Any) -> None:
    return None
