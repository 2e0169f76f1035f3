"""When the steps of an emulated training end; its links are limited meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.emulate import lift_limits, set_limits
from sparsepipe.emulate.training import Rates, rates, steady_part
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import PipelineStrategy, StagedStrategy


class Pulse(pl.Callback):
    """Notes the time of each step of one epoch.

    Links are to be without limits before the training, and are so again after it.

    Args:
        time_scale: how many times slower than the cluster all goes.
        clock: seconds that only grow.
    """

    def __init__(
        self, time_scale: float, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.time_scale = time_scale
        self._clock = clock
        self._begin_s = 0.0
        self._ends_s: list[float] = []
        self._per_step, self._ahead = 1, 0

    def rates(self) -> Rates:
        """Of the epoch, once it is over."""
        return rates(
            self._ends_s,
            begin_s=self._begin_s,
            per_step=self._per_step,
            time_scale=self.time_scale,
            ahead=self._ahead,
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self._per_step = trainer.world_size
        if isinstance(strategy, StagedStrategy):
            self._per_step = strategy.plan.replicas(0)
        if isinstance(strategy, PipelineStrategy):  # a synchronous one is empty after each step
            self._ahead = strategy.plan.warmup(0)
        steady_part(int(trainer.num_training_batches), ahead=self._ahead)  # refused early
        _together("limiting the links")
        if trainer.is_global_zero:
            set_limits()
        _together("limiting the links")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_s = self._clock()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._ends_s.append(self._clock())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _together("lifting the links' limits")
        if trainer.is_global_zero:
            lift_limits()


def _together(what: str) -> None:
    process_group.gather_objects(True, what=what)
