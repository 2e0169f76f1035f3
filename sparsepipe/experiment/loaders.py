"""Fits the loaders of any data module to runs that are stopped and resumed."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loops.loop import _Loop
from torch.utils.data import DataLoader

from sparsepipe.experiment.callbacks.checkpoint import Resume

_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")


def adapt_loaders(data: pl.LightningDataModule, *, resume: Resume | None = None) -> None:
    """Makes loader processes leave Ctrl-C to their parent, and training begin at ``resume``.

    Args:
        data: the data module; its loader methods are replaced on this object.
        resume: where the first training loader begins.
    """
    pending = [resume] if resume is not None else []

    def adapted(hook: Callable[[], Any], *, train: bool) -> Any:
        loaders = hook()
        for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
            if isinstance(loader, DataLoader) and loader.num_workers:
                loader.worker_init_fn = _IgnoreSignals(loader.worker_init_fn)
        if train and pending:
            assert data.trainer is not None
            _begin_epoch(data.trainer, pending[0])
            pending.pop().start(loaders)
        return loaders

    for name in _HOOKS:
        hook = getattr(data, name)
        call = functools.partial(adapted, hook, train=name == "train_dataloader")
        setattr(data, name, functools.wraps(hook)(lambda call=call: call()))


def _begin_epoch(trainer: pl.Trainer, resume: Resume) -> None:
    """Lets a checkpoint of an epoch's end be followed by the next epoch.

    With ``max_steps`` Lightning takes every checkpoint for one within an epoch and would
    end the finished epoch once more.
    """
    if resume.batches == 0:
        # The property of FitLoop itself insists; that of its base does as it is told.
        _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """Worker start-up: a terminal's Ctrl-C reaches the whole process group."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)
