"""Changes to Lightning's loops while a pipeline runs: where they make ranks wait or disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, Timer
from typing_extensions import override

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.stop_agreement import StopAgreement
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import is_remote


class LoopPatches:
    """Changes that are made at setup and undone at teardown.

    - Lightning broadcasts at each step whether rank 0 had a signal, and once more within
      the signal's handler. Off.
    - A stop that one rank requests, or a signal that it received, takes effect on all ranks
      after the same step, see :class:`StopAgreement`; the pipeline drains there. Stops that hooks
      request before an epoch's first step are agreed on there, as at its end.
    - A Timer (``max_time``) broadcasts after each step whether its time is over. Rank 0 requests
      a stop instead.
    - Where one rank reads, its loader stays as the user made it.
    - Stand-ins for batches do not go through the user's hooks for batches.
    """

    def __init__(
        self, trainer: pl.Trainer, replicas: tuple[int, ...], *, drain: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._drain = drain
        self._module = trainer.lightning_module
        self._sampling = internals.uses_distributed_sampler(trainer)
        self._callbacks: tuple[pl.Callback, ...] = ()
        self._agreed = False  # by all ranks; trainer.should_stop may be a request of this one
        self._alone = (ranks := sum(replicas)) == 1
        self._stop = StopAgreement(spread=2 * ranks)
        self._signal = StopAgreement(spread=2 * ranks)
        if replicas[0] == 1:
            internals.set_uses_distributed_sampler(trainer, False)
        if self._alone:
            return
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

        def run() -> None:
            self.stop_for_all()  # after ``on_fit_start``
            type(fit_loop).run(fit_loop)

        def begin_epoch(data_fetcher: Any) -> None:
            type(epoch_loop).on_run_start(epoch_loop, data_fetcher)
            self.stop_for_all()  # after ``on_train_epoch_start``

        def unless_remote(hook: Any) -> Any:
            def guarded(batch: Any, *args: Any, **kwargs: Any) -> Any:
                return batch if is_remote(batch) else hook(batch, *args, **kwargs)

            return guarded

        internals.disable_signal_broadcast(trainer)
        fit_loop.run = run  # type: ignore[method-assign]
        epoch_loop.on_run_start = begin_epoch  # type: ignore[method-assign]
        internals.replace_validation_decision(trainer, self._after_step)
        internals.replace_signal_handler(trainer, self._on_signal)
        internals.wrap_batch_hooks(self._module, unless_remote)
        for timer in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(timer, Timer):
                timer.on_train_batch_end = _timer_step(timer)  # type: ignore[method-assign]
        self._callbacks = (_DrainFirst(drain), _AgreeLast(self))
        trainer.callbacks = [self._callbacks[0], *trainer.callbacks, self._callbacks[1]]  # type: ignore[attr-defined]

    def undo(self) -> None:
        trainer = self._trainer
        internals.set_uses_distributed_sampler(trainer, self._sampling)
        replaced: Any = (trainer.fit_loop, "run"), (trainer.fit_loop.epoch_loop, "on_run_start")
        for loop, name in replaced:
            vars(loop).pop(name, None)
        internals.restore_loops(trainer, self._module)
        kept = [each for each in trainer.callbacks if each not in self._callbacks]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]
        for callback in kept:
            if isinstance(callback, Timer):
                vars(callback).pop("on_train_batch_end", None)

    def drain_follows(self) -> bool:
        """Whether the pipeline must be empty after this training step, as far as is known now.

        So it must at an epoch's end, before a validation, before a checkpoint at a step, when
        ``max_steps`` is reached, and where each step's own loss counts. All ranks come to the same
        answer, for which this rank's own request to stop is hidden.
        """
        trainer = self._trainer
        steps = trainer.global_step + 1
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if (
            internals.epoch_ends(trainer)
            or steps == trainer.max_steps
            or internals.finds_learning_rate(trainer)
            or any(internals.saves_at(callback, steps) for callback in callbacks)
        ):
            return True
        if self._alone:
            return internals.validation_follows(trainer)
        requested, trainer.should_stop = trainer.should_stop, self._agreed
        try:
            return internals.validation_follows(trainer)
        finally:
            trainer.should_stop = trainer.should_stop or requested  # by a signal's handler

    def stop_for_all(self) -> None:
        """Stops all ranks if one requests it; every rank must call this."""
        requested = self._trainer.should_stop or self._stop.pending
        self._agreed = self._trainer.should_stop = bool(process_group.highest(requested))

    def _on_signal(self, signum: Any, _: Any) -> None:
        """Handles a signal to end; Lightning's launcher passes it on."""
        launcher = self._trainer.strategy.launcher
        if not internals.received_signal(self._trainer) and launcher is not None:
            launcher.kill(signum)
        internals.set_received_signal(self._trainer, True)

    def _after_step(self, _: Any) -> bool:
        """Lightning calls this first after the last hook of a step."""
        trainer = self._trainer
        step = trainer.global_step
        if internals.finds_learning_rate(trainer):
            self._agreed = trainer.should_stop  # the finder has broadcast it
        requested = trainer.should_stop and not self._agreed
        self._agreed = self._agreed or self._stop.reached(step, requested=requested)
        trainer.should_stop = self._agreed
        ends = self._signal.reached(step, requested=internals.received_signal(trainer))
        internals.set_received_signal(trainer, ends)
        validates = internals.validation_follows(trainer)
        if validates or trainer.should_stop or ends:
            self._drain()
        return validates


class _DrainFirst(pl.Callback):
    """First of the callbacks, so that the others find everything drained."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._drain()


class _AgreeLast(Checkpoint):
    """Last of the callbacks (checkpoints come last): agrees on stops that the others request."""

    def __init__(self, patches: LoopPatches) -> None:
        self._patches = patches

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._patches.stop_for_all()


def _timer_step(timer: Timer) -> Any:
    """A Timer's hook after a step, in which rank 0 alone looks at the clock."""

    def on_train_batch_end(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero and internals.checks_after_steps(timer):
            left_s = timer.time_remaining()
            if left_s is not None and left_s <= 0:
                trainer.should_stop = True

    return on_train_batch_end
