"""What Lightning's loops will do after the step that is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint


def drain_follows(trainer: pl.Trainer, *, stops: bool) -> bool:
    """Whether the pipeline must be empty after this training step, as far as is known now.

    So it must at an epoch's end, before a validation, before a checkpoint at a step, and
    when ``max_steps`` is reached. All ranks come to the same answer.

    Args:
        trainer: asks.
        stops: whether the ranks have agreed to stop. What ``trainer.should_stop`` says in a
            step's middle may be the wish of this rank alone.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    steps = trainer.global_step + 1
    if epoch_loop._num_ready_batches_reached() or steps == trainer.max_steps:
        return True
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(_saves_at(callback, steps) for callback in callbacks):
        return True
    assert fit_loop._data_fetcher is not None
    with _as_agreed(trainer, stops):
        # The class's, since the strategy puts its own in front of it.
        return bool(type(epoch_loop)._should_check_val_fx(epoch_loop, fit_loop._data_fetcher))


@contextmanager
def _as_agreed(trainer: pl.Trainer, stops: bool) -> Iterator[None]:
    """Hides this rank's own wish to stop; one that a signal's handler has meanwhile stays."""
    wished, trainer.should_stop = trainer.should_stop, stops
    try:
        yield
    finally:
        trainer.should_stop = trainer.should_stop or wished


def _saves_at(callback: Any, steps: int) -> bool:
    every = getattr(callback, "_every_n_train_steps", 0)
    return isinstance(callback, ModelCheckpoint) and every >= 1 and steps % every == 0


class EvaluationProgress:
    """Counts the batches of an evaluation, loader after loader."""

    def __init__(self) -> None:
        self._loader = 0
        self._batch = 0

    def begin(self) -> None:
        """Before the first batch."""
        self._loader = self._batch = 0

    def place(self, loop: Any) -> tuple[list[Any], int]:
        """Loaders of the batch that is running, and its number in them."""
        loaders = list(loop._combined_loader.flattened)
        if not _one_after_the_other(loop):
            return loaders, self._batch
        while loop.max_batches[self._loader] == 0:
            self._loader += 1
        return [loaders[self._loader]], self._batch

    def advance(self, loop: Any) -> bool:
        """Notes that the batch is done; whether it was the last of its loader."""
        self._batch += 1
        last = bool(loop._data_fetcher.done)
        if _one_after_the_other(loop) and self._batch >= loop.max_batches[self._loader]:
            self._loader, self._batch, last = self._loader + 1, 0, True
        return last


def _one_after_the_other(loop: Any) -> bool:
    return bool(loop._combined_loader._mode == "sequential")
