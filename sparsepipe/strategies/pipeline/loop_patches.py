"""Changes Lightning's loops while a pipeline runs, where ranks would wait or disagree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, Timer

from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.stop_agreement import StopAgreement
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import is_remote


class LoopPatches:
    """Changes of Lightning's loops, which the constructor makes and :meth:`undo` reverts.

    - Lightning's broadcasts of whether rank 0 received a signal, at each step and within the
      signal's handler, are off.
    - A stop that one rank requests in a step or at an epoch's end, or a signal that it received,
      takes effect on all ranks after the same step (see :class:`StopAgreement`), when ``drain`` has
      emptied the pipeline.
    - A Timer (``max_time``) does not broadcast after each step whether its time is over: rank 0
      requests a stop instead.
    - If a single rank reads, its loader keeps the user's sampler; if several do, Lightning's
      samplers repeat no sample in evaluations.
    - Stand-ins for batches skip the module's hooks that transfer batches.
    """

    def __init__(
        self, trainer: pl.Trainer, replicas: tuple[int, ...], *, drain: Callable[[], None]
    ) -> None:
        self._trainer, self._module, self._drain = trainer, trainer.lightning_module, drain
        self._callbacks: tuple[pl.Callback, ...] = ()
        self._agreed = False  # on a stop; trainer.should_stop may be this rank's own request
        self._alone = (ranks := sum(replicas)) == 1
        self._stop, self._signal = StopAgreement(spread=2 * ranks), StopAgreement(spread=2 * ranks)
        connector = internals.accelerator_connector(trainer)
        self._sampling = connector.use_distributed_sampler
        if replicas[0] == 1:
            connector.use_distributed_sampler = False
        else:
            internals.unpad_evaluation_samplers(trainer)
        if self._alone:
            return
        internals.replace_in_loops(
            trainer,
            decide=self._after_step,
            handle=self._on_signal,
            wrap=lambda hook: (
                lambda batch, *args, **kwargs: (
                    batch if is_remote(batch) else hook(batch, *args, **kwargs)
                )
            ),
        )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for timer in callbacks:
            if isinstance(timer, Timer):
                timer.on_train_batch_end = partial(internals.after_timed_step, timer)  # type: ignore[method-assign]
        # The other callbacks find the pipeline drained. Stops that they request are agreed on
        # after them, in a checkpoint callback, since Lightning calls these last.
        first, last = self._callbacks = pl.Callback(), Checkpoint()
        first.on_train_epoch_end = lambda *_: drain()  # type: ignore[method-assign]
        last.on_train_epoch_end = lambda *_: self.stop_for_all()  # type: ignore[method-assign]
        trainer.callbacks = [first, *callbacks, last]  # type: ignore[attr-defined]

    def undo(self) -> None:
        trainer = self._trainer
        internals.accelerator_connector(trainer).use_distributed_sampler = self._sampling
        internals.restore_loops(trainer, self._module)
        kept = [each for each in trainer.callbacks if each not in self._callbacks]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]
        for callback in kept:
            if isinstance(callback, Timer):
                vars(callback).pop("on_train_batch_end", None)

    def drain_follows(self) -> bool:
        """Returns whether the pipeline must drain in this training step, before the hooks after it.
        All ranks get the same answer: a stop that this rank alone requests is ignored.
        """
        trainer = self._trainer
        steps = trainer.global_step + 1
        if (
            internals.ends_or_saves(trainer, steps)
            or steps == trainer.max_steps
            or internals.finds_learning_rate(trainer)
        ):
            return True
        if self._alone:
            return internals.validation_follows(trainer)
        requested, trainer.should_stop = trainer.should_stop, self._agreed
        try:
            return internals.validation_follows(trainer)
        finally:
            trainer.should_stop = trainer.should_stop or requested  # a signal's handler may set it

    def stop_for_all(self) -> None:
        """Makes all ranks stop if at least one requests it; every rank must call this."""
        requested = self._trainer.should_stop or self._stop.agreed is not None
        self._agreed = self._trainer.should_stop = bool(process_group.highest(requested))

    def _on_signal(self, signum: Any, _: Any) -> None:
        """Notes a termination signal; sends it to the ranks that Lightning's launcher started."""
        signals, launcher = internals.signals(self._trainer), self._trainer.strategy.launcher
        if not signals.received_sigterm and launcher is not None:
            launcher.kill(signum)
        signals.received_sigterm = True

    def _after_step(self, _: Any) -> bool:
        """Drains if validation or a stop follows this step; returns whether validation does."""
        trainer, signals = self._trainer, internals.signals(self._trainer)
        step = trainer.global_step
        if internals.finds_learning_rate(trainer):
            self._agreed = trainer.should_stop  # the finder has broadcast its decision
        requested = trainer.should_stop and not self._agreed
        self._agreed = self._agreed or self._stop.reached(step, requested=requested)
        trainer.should_stop = self._agreed
        ends = self._signal.reached(step, requested=signals.received_sigterm)
        signals.received_sigterm = ends
        validates = internals.validation_follows(trainer)
        if validates or trainer.should_stop or ends:
            self._drain()
        return validates
