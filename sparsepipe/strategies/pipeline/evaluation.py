"""The Strategy's hooks for validation, test and prediction."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies.strategy import Strategy
from pytorch_lightning.utilities.types import STEP_OUTPUT
from typing_extensions import override

from sparsepipe.strategies.pipeline.foresight import EvaluationProgress
from sparsepipe.strategies.pipeline.pipeline import Pipeline
from sparsepipe.strategies.pipeline.ranks import StagedRanks


class PipelinedEvaluation(StagedRanks):
    """Batches stream through the stages; what they logged is known after a loader's last.

    Predictions do not stream: a rank that reads has the answer to each batch before it begins
    its next one, so that there are no more on their way than ranks that read.

    Where there is no pipeline, a single rank evaluates as a plain Trainer.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pipeline: Pipeline | None = None
        self._progress = EvaluationProgress()

    @property
    def pipeline(self) -> Pipeline | None:
        """What runs on this rank; None where a single rank trains as a plain Trainer."""
        return self._pipeline

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def on_validation_start(self) -> None:
        self._progress.begin()

    @override
    def on_test_start(self) -> None:
        self._progress.begin()

    @override
    def on_predict_start(self) -> None:
        self._progress.begin()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step("test_step", *args, **kwargs)

    def _evaluation_step(self, hook: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        pipeline = self._pipeline
        if pipeline is None:
            with self.throttle.slowed():
                return getattr(Strategy, hook)(self, *args, **kwargs)  # type: ignore[no-any-return]
        batch, *arguments = (*args, *kwargs.values())
        loop = self._trainer._evaluation_loop
        count = self.count_minibatches(*self._progress.place(loop), batch)
        pipeline.evaluate(hook, batch, tuple(arguments), count=count)
        if self._progress.advance(loop):
            pipeline.end_evaluation(hook)
        return None

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._pipeline
        if pipeline is None:
            with self.throttle.slowed():
                return Strategy.predict_step(self, *args, **kwargs)
        batch, *arguments = (*args, *kwargs.values())
        loop = self._trainer.predict_loop
        count = self.count_minibatches(*self._progress.place(loop), batch)
        result = pipeline.predict("predict_step", batch, tuple(arguments), count=count)
        if self._progress.advance(loop):
            pipeline.worker.end_evaluation()
        return result
