"""Ends a training whose loss or weights are no longer finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor
from typing_extensions import override

from sparsepipe.errors import DivergedError
from sparsepipe.runs.best import NONFINITE
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.sharding import reading_parameters

log = logging.getLogger(__name__)


class FiniteOnly(pl.Callback):
    """Ends a training whose loss or weights are no longer finite, or warns of it once.

    Each rank looks at every loss before its backward pass, and at the trained parameters that it
    holds after an epoch and before a validation or a checkpoint. On a GPU it reads the losses of
    ``log_every_n_steps`` steps together, so that the CPU does not wait for each step. Gradients may
    overflow: a gradient scaler skips their update.

    Args:
        action: ``stop`` raises a :class:`sparsepipe.errors.DivergedError`; ``warn`` logs it.

    Attributes:
        weights_are_finite: whether those of all ranks were finite after the last epoch.
    """

    def __init__(self, action: Literal["stop", "warn"] = "stop") -> None:
        self._stops = action == "stop"
        self._found: str | None = None
        self.weights_are_finite = True
        self._losses: list[tuple[str, Tensor]] = []

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._losses.append((_moment(trainer), loss.detach()))
        if loss.device.type == "cpu" or len(self._losses) >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._read()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        are_finite = self._look(trainer, pl_module)
        if not self._stops:  # else this rank would have raised an error
            self.weights_are_finite = not process_group.highest(not are_finite)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._look(trainer, pl_module)
        if found := self.agreed():
            checkpoint[NONFINITE] = found

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._found = checkpoint.get(NONFINITE)

    def agreed(self) -> str | None:
        """Returns what any rank has found not to be finite first, if anything; collective."""
        if self._stops:
            return self._found
        return next(filter(None, process_group.gather_objects(self._found)), None)

    def _read(self) -> None:
        losses, self._losses = self._losses, []
        if (first := _first_bad([loss for _, loss in losses])) is not None:
            moment, loss = losses[first]
            self._report(f"the loss is {float(loss.sum())} in {moment}")

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Reads the losses; returns whether the parameters that this rank trains are finite."""
        self._read()
        with reading_parameters(trainer.strategy):
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if (first := _first_bad([p.detach() for _, p in trained])) is not None:
            name = trained[first][0]
            self._report(f"the parameter {name} is not finite after {_moment(trainer)}")
        return first is None

    def _report(self, found: str) -> None:
        if self._stops:
            raise DivergedError(
                f"the training has diverged: {found}",
                remedy="lower optim.optimizer.lr, set trainer.gradient_clip_val or another "
                "trainer.precision, or check the data; trainer.nonfinite=warn goes on all the same",
            )
        if self._found is None:
            log.warning("%s; the training goes on, since trainer.nonfinite=warn", found)
            self._found = found


def _first_bad(tensors: Sequence[Tensor]) -> int | None:
    """Index of the first of ``tensors`` that is not finite; None if all are."""
    finite = [each.isfinite().all() for each in tensors]
    found = torch.stack(finite).tolist() if finite else []  # one wait for the device
    return found.index(False) if False in found else None


def _moment(trainer: pl.Trainer) -> str:
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return f"epoch {trainer.current_epoch + 1}, batch {batch}"
