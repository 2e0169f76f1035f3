"""What a rank's worker tells while it trains, and what becomes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor
from typing_extensions import override

from sparsepipe.runtime.protocols import Microbatch
from sparsepipe.strategies.pipeline.logs import Logs, Repeater
from sparsepipe.strategies.pipeline.microbatch_logs import merged
from sparsepipe.strategies.pipeline.updates import Updates

TRAINING = "training_step"


class StepEvents(ABC):
    """Hooks, updates, and logs, which are kept for the next drain by what orders them.

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
        self._kept: list[tuple[Any, Any]] = []
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

    @abstractmethod
    def logs_of(self, kept: Iterable[Any]) -> list[Logs]:
        """What each minibatch logged, of what was kept of them, both in order."""

    def keep(self, found: Iterable[tuple[Any, Any]]) -> None:
        """Keeps what minibatches logged, where this rank is to tell of it."""
        if self._keeps:
            self._kept += found

    def take(self) -> list[tuple[Any, Any]]:
        """What was kept since the last time."""
        kept, self._kept = self._kept, []
        return kept


class TrainingEvents(StepEvents):
    """Of the asynchronous pipeline, where minibatches come back one by one."""

    def done(self, minibatch: int, *, loss: Tensor, logs: Logs) -> None:
        """Shows what a minibatch logged, for now."""
        self.loss = loss
        self.keep([(minibatch, logs)])
        self.repeater.show(logs, hook=TRAINING)

    @override
    def logs_of(self, kept: Iterable[Any]) -> list[Logs]:
        return list(kept)


class MicrobatchEvents(StepEvents):
    """Of a synchronous pipeline, where a step's microbatches are as one minibatch.

    Loss and logs of a step are those of the microbatches that came this way, until the drain: of
    all where no stage between here and the last has replicas.
    """

    def done(self, microbatches: Sequence[Microbatch]) -> None:
        """Shows what a minibatch logged."""
        if not microbatches:
            return
        self.loss = _mean_loss(microbatches)
        self.keep(
            ((part.minibatch, part.number), (part.minibatch, part.samples, part.logs))
            for part in microbatches
        )
        logs = merged([(part.samples, part.logs) for part in microbatches])
        self.repeater.show(logs, hook=TRAINING)

    @override
    def logs_of(self, kept: Iterable[Any]) -> list[Logs]:
        return [
            merged([(samples, logs) for _, samples, logs in parts])
            for _, parts in groupby(kept, key=lambda part: part[0])
        ]


def _mean_loss(microbatches: Sequence[Microbatch]) -> Tensor:
    first = microbatches[0].loss
    if len(microbatches) == 1:
        return first
    weighted = torch.stack([part.weight * part.loss.double() for part in microbatches])
    return (weighted.sum() / sum(part.weight for part in microbatches)).to(first.dtype)
