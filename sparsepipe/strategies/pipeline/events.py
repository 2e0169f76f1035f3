"""What a rank's worker tells while it trains, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor

from sparsepipe.strategies.pipeline.logs import Logs, Repeater
from sparsepipe.strategies.pipeline.updates import Updates

TRAINING = "training_step"


class TrainingEvents:
    """Hooks, updates, and logs, which are shown for now and kept for the next drain.

    Args:
        module: the LightningModule, reduced to this rank's share.
        updates: applies gradients; None where nothing is trained.
        precision: Lightning's, for its hooks.
        keeps: this rank is of the last stage, where steps log.

    Attributes:
        loss: of the last minibatch that came back to this rank.
        repeater: repeats logs on this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        updates: Updates | None,
        precision: Precision,
        keeps: bool,
    ) -> None:
        self._module = module
        self._updates = updates
        self._precision = precision
        self._keeps = keeps
        self.loss = torch.zeros((), device=module.device)
        self._kept: list[tuple[int, Logs]] = []
        self.repeater = Repeater(module)

    def begin(self, step: int) -> None:
        """A round enters; steps count from 0 after a drain."""
        assert self._updates is not None
        self._updates.note(step)

    def before_backward(self, loss: Tensor) -> None:
        """Runs the hooks for it."""
        self._precision.pre_backward(loss, self._module)

    def update(self, gradients: Mapping[str, Tensor | None], *, step: int) -> None:
        """Applies gradients."""
        assert self._updates is not None
        self._updates.apply(gradients, loss=self.loss, step=step)

    def done(self, minibatch: int, *, loss: Tensor, logs: Logs) -> None:
        """Shows what a minibatch logged, for now."""
        self.loss = loss
        self.keep([(minibatch, logs)])
        self.repeater.show(logs, hook=TRAINING)

    def keep(self, found: list[tuple[int, Any]]) -> None:
        """Keeps what minibatches logged, where this rank is to tell of it."""
        if self._keeps:
            self._kept += found

    def take(self) -> list[tuple[int, Logs]]:
        """What was kept since the last time."""
        kept, self._kept = self._kept, []
        return kept
