"""Changes to Lightning's loops while a pipeline runs: where they make ranks wait or disagree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint, Timer
from pytorch_lightning.callbacks.timer import Interval
from pytorch_lightning.utilities import rank_zero_info
from typing_extensions import override

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.stop_agreement import StopAgreement
from sparsepipe.strategies.pipeline.dataloaders import is_elsewhere
from sparsepipe.strategies.trainer_internals import replace_signal_broadcast


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


class Owner(Protocol):
    """The strategy, as far as it is needed here."""

    @property
    def replicas(self) -> tuple[int, ...]: ...
    def drain(self) -> None: ...


class LoopPatches:
    """Made at setup, undone at teardown.

    - Lightning broadcasts at each step whether rank 0 had a signal, and once more within
      the signal's handler. Off.
    - A stop that one rank wishes, or a signal that came to it, takes effect on all ranks
      after the same step, see :class:`StopAgreement`; the pipeline drains there. What hooks
      wish before an epoch's first step is agreed on there, as at its end.
    - A Timer (``max_time``) broadcasts after each step whether its time is over. Rank 0 asks
      for a stop instead.
    - Where one rank reads, its loader stays as the user made it.
    - Stand-ins for batches do not go through the user's hooks for batches, and count as one
      sample in what hooks log.

    Args:
        trainer: its loops change.
        owner: the strategy.
    """

    def __init__(self, trainer: pl.Trainer, owner: Owner) -> None:
        self._trainer = trainer
        self._owner = owner
        self._fit_loop, self._epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._module = trainer.lightning_module
        self._connector = trainer._accelerator_connector
        self._sampling = self._connector.use_distributed_sampler
        self._callbacks = (_First(owner), _Last(self))
        self._timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
        self._standing = False  # what the ranks have agreed on; trainer.should_stop may be a wish
        self._alone = (ranks := sum(owner.replicas)) == 1
        self._stop = StopAgreement(spread=2 * ranks)
        self._signal = StopAgreement(spread=2 * ranks)
        if owner.replicas[0] == 1:
            self._connector.use_distributed_sampler = False
        if self._alone:
            return
        replace_signal_broadcast(trainer, _nothing)
        self._fit_loop.run = self._run  # type: ignore[method-assign]
        self._epoch_loop.on_run_start = self._begin_epoch  # type: ignore[method-assign]
        self._epoch_loop._should_check_val_fx = self._after_step  # type: ignore[method-assign]
        trainer._signal_connector._sigterm_notifier_fn = self._notice  # type: ignore[method-assign]
        for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
            object.__setattr__(self._module, name, _guarded(getattr(self._module, name)))
        trainer._logger_connector.on_batch_start = _sized(trainer)  # type: ignore[method-assign]
        for timer in self._timers:
            timer.on_train_batch_end = _asking(timer)  # type: ignore[method-assign]
        first, last = self._callbacks
        trainer.callbacks = [first, *trainer.callbacks, last]  # type: ignore[attr-defined]

    def undo(self) -> None:
        """Leaves everything as it was."""
        self._connector.use_distributed_sampler = self._sampling
        self._fit_loop.__dict__.pop("run", None)
        for name in ("_broadcast_sigterm_tensor", "_should_check_val_fx", "on_run_start"):
            self._epoch_loop.__dict__.pop(name, None)
        self._trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
        for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
            self._module.__dict__.pop(name, None)
        self._trainer._logger_connector.__dict__.pop("on_batch_start", None)
        for timer in self._timers:
            timer.__dict__.pop("on_train_batch_end", None)
        ours, trainer = self._callbacks, self._trainer
        kept = [callback for callback in trainer.callbacks if callback not in ours]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]

    @property
    def stops(self) -> bool:
        """Whether all ranks know of each other that they stop as soon as they may."""
        return self._trainer.should_stop if self._alone else self._standing

    def stop_for_all(self) -> None:
        """What one rank wishes now is done by all; every rank must call it."""
        wished = self._trainer.should_stop or self._stop.pending
        self._standing = self._trainer.should_stop = process_group.any_rank(wished)

    def _notice(self, signum: Any, _: Any) -> None:
        """Handles a signal to end; Lightning's launcher passes it on."""
        signals, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if not signals.received_sigterm and launcher is not None:
            launcher.kill(signum)
        signals.received_sigterm = True

    def _run(self) -> None:
        self.stop_for_all()  # after ``on_fit_start``
        type(self._fit_loop).run(self._fit_loop)

    def _begin_epoch(self, data_fetcher: Any) -> None:
        type(self._epoch_loop).on_run_start(self._epoch_loop, data_fetcher)
        self.stop_for_all()  # after ``on_train_epoch_start``

    def _after_step(self, data_fetcher: Any) -> bool:
        """Lightning asks this first after the last hook of a step."""
        trainer = self._trainer
        step = trainer.global_step
        asked = trainer.should_stop and not self._standing
        self._standing = self._standing or self._stop.reached(step, asked=asked)
        trainer.should_stop = self._standing
        signals = trainer._signal_connector
        signals.received_sigterm = self._signal.reached(step, asked=signals.received_sigterm)
        validates = type(self._epoch_loop)._should_check_val_fx(self._epoch_loop, data_fetcher)
        if validates or trainer.should_stop or signals.received_sigterm:
            self._owner.drain()
        return validates


class _First(pl.Callback):
    """First of the callbacks, so that the others find everything drained."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._owner.drain()


class _Last(Checkpoint):
    """Last of the callbacks (checkpoints come last): agrees on what the others wish."""

    def __init__(self, patches: LoopPatches) -> None:
        self._patches = patches

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._patches.stop_for_all()


def _nothing() -> None:
    return None


def _asking(timer: Timer) -> Any:
    """What a Timer does after a step, but that rank 0 alone looks at its clock."""
    over = False

    def on_train_batch_end(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        nonlocal over
        if not trainer.is_global_zero or timer._interval != Interval.step:
            return
        left_s = timer.time_remaining()
        if left_s is None or left_s > 0:
            return
        trainer.should_stop = True
        if timer._verbose and not over:
            rank_zero_info("Time limit reached. All ranks stop within some steps.")
        over = True

    return on_train_batch_end


def _sized(trainer: pl.Trainer) -> Any:
    """Notes the batch that is to be logged of, and what Lightning cannot find out of it."""
    note = trainer._logger_connector.on_batch_start

    def on_batch_start(batch: Any, *args: Any, **kwargs: Any) -> None:
        note(batch, *args, **kwargs)
        if is_elsewhere(batch):
            assert trainer._results is not None
            trainer._results.batch_size = 1

    return on_batch_start


def _guarded(hook: Any) -> Any:
    def guarded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch if is_elsewhere(batch) else hook(batch, *args, **kwargs)

    return guarded
