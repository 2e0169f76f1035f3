"""The plan of a pipeline, kept for the processes that go on with its run."""

from __future__ import annotations

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.experiment.outputs import writing
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.results.files import write_text_atomic
from sparsepipe.strategies import PipelineStrategy


class KeepPlan(pl.Callback):
    """Writes the plan into the run's directory as training begins, as a plan file.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, path = trainer.strategy, self._directory.plan
        if not isinstance(strategy, PipelineStrategy) or not trainer.is_global_zero:
            return
        if not path.exists():
            with writing(path):
                write_text_atomic(path, strategy.plan.to_json())
