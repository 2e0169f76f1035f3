"""Fits the loaders of any data module to runs that are stopped and resumed."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
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
        return pending.pop().start(loaders) if train and pending else loaders

    for name in _HOOKS:
        hook = getattr(data, name)
        call = functools.partial(adapted, hook, train=name == "train_dataloader")
        setattr(data, name, functools.wraps(hook)(lambda call=call: call()))


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """Worker start-up: a terminal's Ctrl-C reaches the whole process group."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)
