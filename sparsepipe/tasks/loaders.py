"""Loaders of a run leave signals and the random numbers of its training alone."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler

from sparsepipe.runs.randomness import mixed

_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")


def adapt_loaders(data: pl.LightningDataModule, *, seed: int) -> None:
    """Makes loaders leave Ctrl-C and torch's generator alone."""

    def adapted(hook: Callable[[], Any]) -> Any:
        loaders = hook()
        entries = loaders.flattened if isinstance(loaders, CombinedLoader) else [loaders]
        for loader in pytree.tree_leaves(entries):
            if isinstance(loader, DataLoader):
                _adapt(loader, seed)
        return loaders

    for name in _HOOKS:
        hook = getattr(data, name)
        setattr(data, name, functools.wraps(hook)(functools.partial(adapted, hook)))


def _adapt(loader: DataLoader[Any], seed: int) -> None:
    """Gives a loader generators of its own, since torch's would shift the dropout masks, and
    workers that ignore Ctrl-C.
    """
    loader.generator = torch.Generator()
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = torch.Generator()
    for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
        if generator is not None:
            generator.manual_seed(mixed(seed, 0))
    if loader.num_workers and not isinstance(loader.worker_init_fn, _IgnoreSignals):
        loader.worker_init_fn = _IgnoreSignals(loader.worker_init_fn)


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """Worker start-up: a terminal's Ctrl-C reaches the whole process group."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)
