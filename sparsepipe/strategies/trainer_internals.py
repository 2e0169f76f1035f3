"""Every private name of Lightning that SparsePipe relies on, behind public functions.

No other file uses them. ``tests/unit/strategies/test_trainer_internals.py`` lists them and names
those that the installed version of Lightning lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning_fabric.utilities.distributed import _distributed_is_initialized
from lightning_fabric.utilities.optimizer import _optimizer_to_device
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.callbacks.timer import Interval
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.connectors.data_connector import _get_distributed_sampler
from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from pytorch_lightning.trainer.states import RunningStage, TrainerStatus
from pytorch_lightning.tuner.lr_finder import _LRCallback
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from sparsepipe.runtime.safe_pickle import REDUCTIONS

LoggedValue = _ResultMetric
"""A value that ``self.log`` logs, with its sums over the epoch."""

_EVALUATING = (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING, RunningStage.TESTING)
_BATCH_HOOKS = ("_on_before_batch_transfer", "_apply_batch_transfer_handler")
ACCUMULATED = ("value", "cumulated_batch_size", "_update_count", "has_reset", "_forward_cache")
"""Attributes with a LoggedValue's sums, never changed in place: saved values stay valid."""
move_optimizer = _optimizer_to_device
"""Moves an optimizer's state, except for step counters, to a device."""
process_group_exists = _distributed_is_initialized
"""Whether this process has joined a default process group."""


# The module.


def run_failed(module: pl.LightningModule | None) -> bool:
    """Returns whether the last run of a module's Trainer failed, or the module has no Trainer."""
    trainer = None if module is None else module._trainer
    return trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED


def is_compiled(module: pl.LightningModule) -> bool:
    """Returns whether ``torch.compile`` was applied to the whole module."""
    return getattr(module, "_compiler_ctx", None) is not None


@contextmanager
def actual_device(module: pl.LightningModule) -> Iterator[torch.device]:
    """Context in which ``module.device`` is the device of its parameters; yields that device.

    Before a strategy moves a module, Lightning already reports the device to which it will go.
    """
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    reported = [(m, m._device) for m in module.modules() if isinstance(m, _DeviceDtypeModuleMixin)]
    for child, _ in reported:
        child._device = device
    try:
        yield device
    finally:
        for child, before in reported:
            child._device = before


# Logged values.


logged_values: Callable[[pl.Trainer], Any] = attrgetter("_results")
"""Values logged in the running loop, by key (:data:`LoggedValue`); None outside of loops."""
training_values: Callable[[pl.Trainer], Mapping[str, LoggedValue]] = attrgetter(
    "fit_loop.epoch_loop._results"
)
"""Values logged in the training loop by key, whichever loop is running."""
current_hook: Callable[[pl.LightningModule], str | None] = attrgetter("_current_fx_name")
"""Name of the hook to which ``self.log`` assigns values."""


@contextmanager
def logging_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Context in which ``self.log`` assigns values to ``hook``, as if it were the last to run.

    Otherwise Lightning would reset the epoch's sums.
    """
    connector = module.trainer._logger_connector
    before, module._current_fx_name = module._current_fx_name, hook
    last, connector._current_fx = connector._current_fx, hook
    yield
    module._current_fx_name = before
    connector._current_fx = last


def options_of(item: LoggedValue) -> dict[str, Any] | None:
    """Returns the options of a logged value as plain values, for :func:`restore_logged`; None: it
    has a process group of its own, which no other process has.
    """
    meta, sync = item.meta, item.meta.sync
    if sync.group is not None:
        return None
    plain = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "_sync"}
    plain["reduce_fx"] = next(n for n, f in REDUCTIONS.items() if f is meta.reduce_fx)
    return {
        "meta": plain,
        "is_number": item.is_tensor,
        "synchronised": sync.should,
        "first_only": sync.rank_zero_only,
    }


def restore_logged(trainer: pl.Trainer, key: str, options: Mapping[str, Any]) -> LoggedValue:
    """Enters a value among those of the training loop, as if an earlier step of the running epoch
    had logged it; returns its entry, which has no sums yet.
    """
    plain = dict(options["meta"])
    meta = _Metadata(**{**plain, "reduce_fx": REDUCTIONS[plain["reduce_fx"]]})
    # Lightning compares these with the options of the next call.
    meta.sync = _Sync(
        fn=trainer.strategy.reduce,
        _should=options["synchronised"],
        rank_zero_only=options["first_only"],
    )
    item = _ResultMetric(meta, is_tensor=options["is_number"])
    trainer.fit_loop.epoch_loop._results[key] = item
    # Else Lightning would reset the sums in this process's first step.
    trainer._logger_connector._first_loop_iter = False
    return item


def log_step_metrics(trainer: pl.Trainer) -> None:
    """Sends the running step's metrics to the loggers, as Lightning does after a batch."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


# Loops.


active_loop: Callable[[pl.Trainer], Any] = attrgetter("_active_loop")
"""The running loop: training, validation (also within a fit), test or prediction."""
loaders_of: Callable[[Any], list[Any]] = attrgetter("_combined_loader.flattened")
"""Data loaders that a loop reads."""
reading_mode: Callable[[Any], str] = attrgetter("_combined_loader._mode")
"""``"sequential"`` for a loop that reads one loader after the other, not all side by side."""
has_read_all: Callable[[Any], bool] = attrgetter("_data_fetcher.done")
"""Whether a loop's running batch is its last."""
optimizer_steps: Callable[[pl.Trainer], int] = attrgetter(
    "fit_loop.epoch_loop._batches_that_stepped"
)
"""Number of training batches so far that ended with an optimizer step: the loggers' step."""


def combined_batch(
    trainer: pl.Trainer, loop: Any, batches: Sequence[Any], *, device: torch.device
) -> Any:
    """Combines ``batches``, one from each loader, as ``loop`` does, and moves them to a device."""
    module, spec = trainer.lightning_module, loop._combined_loader._spec
    in_turn = reading_mode(loop) == "sequential"
    batch = batches[0] if in_turn else pytree.tree_unflatten(batches, spec)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def ends_or_saves(trainer: pl.Trainer, step: int) -> bool:
    """Returns whether the epoch ends with this step, or a callback saves after ``step`` steps."""
    if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        return True
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    intervals = [c._every_n_train_steps for c in callbacks if isinstance(c, ModelCheckpoint)]
    return any(every >= 1 and step % every == 0 for every in intervals)


def validation_follows(trainer: pl.Trainer) -> bool:
    """Returns whether validation follows this step by Lightning's own rule, even if replaced."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return bool(type(loop)._should_check_val_fx(loop, fetcher))


def clear_restarting(trainer: pl.Trainer) -> None:
    """Makes training start its epoch from the beginning although a checkpoint was loaded.

    The training loop's own property cannot be cleared, but that of its base class can.
    """
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def replace_loader_restoration(trainer: pl.Trainer, prepare: Callable[[], None]) -> None:
    """Makes Lightning call ``prepare`` instead of restoring loaders, before it reads from them."""
    trainer.fit_loop._load_combined_loader_states = prepare  # type: ignore[method-assign]


# Signals and time limits.


def disable_signal_broadcast(trainer: pl.Trainer) -> None:
    """Turns off Lightning's broadcast, at each step's beginning, of whether a signal arrived."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


signals: Callable[[pl.Trainer], Any] = attrgetter("_signal_connector")
"""Lightning's signal connector, whose ``received_sigterm`` may be set."""


def replace_in_loops(
    trainer: pl.Trainer,
    *,
    decide: Callable[[Any], bool],
    handle: Callable[[Any, Any], None],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Changes what Lightning does around steps, and turns off its broadcast of signals.

    ``decide`` is called with the data fetcher after each step and tells whether to validate;
    ``handle`` is called with a signal's number and frame; ``wrap`` is given each of the module's
    hooks for batches and returns its replacement.
    """
    disable_signal_broadcast(trainer)
    trainer.fit_loop.epoch_loop._should_check_val_fx = decide  # type: ignore[method-assign, assignment]
    trainer._signal_connector._sigterm_notifier_fn = handle  # type: ignore[method-assign, assignment]
    for name in _BATCH_HOOKS:
        hook = getattr(trainer.lightning_module, name)
        object.__setattr__(trainer.lightning_module, name, wrap(hook))


def restore_loops(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Undoes what functions of this file changed in hooks, signals, validation and samplers."""
    replaced: dict[Any, tuple[str, ...]] = {
        module: _BATCH_HOOKS,
        trainer._signal_connector: ("_sigterm_notifier_fn",),
        trainer._data_connector: ("_resolve_sampler",),
        trainer.fit_loop.epoch_loop: ("_should_check_val_fx", "_broadcast_sigterm_tensor"),
    }
    for owner, names in replaced.items():
        for name in names:
            vars(owner).pop(name, None)


def goes_by_clock(owner: pl.Trainer | pl.Callback) -> bool:
    """Returns whether a Trainer validates, or a callback saves, at intervals of time."""
    names = ("_val_check_time_interval", "_train_time_interval")
    return any(getattr(owner, name, None) is not None for name in names)


def finds_learning_rate(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning's learning rate finder is running.

    The finder looks at the loss of each step, and stops all ranks together.
    """
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def after_timed_step(timer: Timer, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
    """Replaces a Timer's hook after a step: only rank 0 looks at the clock, without a broadcast."""
    if trainer.is_global_zero and timer._interval == Interval.step:
        left_s = timer.time_remaining()
        if left_s is not None and left_s <= 0:
            trainer.should_stop = True


# Strategy, optimizers and samplers.


def synchronises_batch_norm(strategy: DDPStrategy) -> bool:
    """Returns whether the Trainer was given ``sync_batchnorm=True``."""
    return strategy._layer_sync is not None


def resolve_process_group_backend(strategy: DDPStrategy) -> str:
    """Returns a strategy's process group backend; stores the default if the user gave none."""
    strategy._process_group_backend = strategy._get_process_group_backend()
    return strategy._process_group_backend


accelerator_connector: Callable[[pl.Trainer], Any] = attrgetter("_accelerator_connector")
"""Lightning's object with ``use_distributed_sampler``: whether it replaces loaders' samplers."""


def unpad_evaluation_samplers(trainer: pl.Trainer) -> None:
    """Makes Lightning's samplers for validation and test repeat no sample, so each counts once."""
    connector = trainer._data_connector

    def resolve(loader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None) -> Any:
        if mode not in _EVALUATING or not connector._requires_distributed_sampler(loader):
            return type(connector)._resolve_sampler(connector, loader, shuffle, mode)
        kwargs = trainer.distributed_sampler_kwargs
        assert kwargs is not None
        overfits: float = trainer.overfit_batches  # type: ignore[attr-defined]
        sampler = _get_distributed_sampler(loader, shuffle, overfits, mode=mode, **kwargs)
        sampler.total_size = size = len(sampler.dataset)  # type: ignore[arg-type]
        sampler.num_samples = len(range(sampler.rank, size, sampler.num_replicas))
        return sampler

    connector._resolve_sampler = resolve  # type: ignore[method-assign, assignment]
