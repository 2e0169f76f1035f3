"""Loaders and random numbers of runs that are stopped and resumed."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, RandomSampler
from typing_extensions import override

from sparsepipe.callbacks.checkpoint import Resume
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies.pipeline.dataloaders import Padded
from sparsepipe.strategies.trainer_internals import clear_restarting

_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")


def adapt_loaders(data: pl.LightningDataModule, *, seed: int, resume: Resume | None = None) -> None:
    """Makes loaders leave Ctrl-C and torch's generator alone, and training begin at ``resume``."""
    pending = [resume] if resume is not None else []

    def adapted(hook: Callable[[], Any], *, train: bool) -> Any:
        loaders = hook()
        for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
            if isinstance(loader, DataLoader):
                _adapt(loader, seed, resume.epoch if resume else 0)
        if train and pending:
            assert data.trainer is not None
            _begin_epoch(data.trainer, pending[0])
            pending.pop().start(loaders)
        return loaders

    for name in _HOOKS:
        hook = getattr(data, name)
        call = functools.partial(adapted, hook, train=name == "train_dataloader")
        setattr(data, name, functools.wraps(hook)(lambda call=call: call()))


def _adapt(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Gives a loader generators of its own, since torch's would shift the dropout masks, and
    workers that ignore Ctrl-C.
    """
    loader.generator = torch.Generator()
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = torch.Generator()
    _seed_loader(loader, seed, epoch)
    if loader.num_workers:
        loader.worker_init_fn = _IgnoreSignals(loader.worker_init_fn)


def _seed_loader(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
        if generator is not None:
            generator.manual_seed(mixed(seed, epoch))


class EpochSeeds(pl.Callback):
    """Lets an epoch's random numbers depend on (seed, epoch, rank) alone.

    What an earlier epoch, its validation or a loader drew has no influence, so that a
    resumed run and one with another number of loader workers draw the same. What a data
    set draws within persistent workers is its own affair: they live for many epochs.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = trainer.train_dataloader
        for entry in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
            loader = entry.loader if isinstance(entry, Padded) else entry
            if isinstance(loader, DataLoader):
                _seed_loader(loader, self._seed, trainer.current_epoch)
        seed_epoch(self._seed, trainer.current_epoch)


def _begin_epoch(trainer: pl.Trainer, resume: Resume) -> None:
    """Starts the next epoch after an epoch's last checkpoint, which Lightning with ``max_steps``
    takes for one within the epoch.
    """
    if resume.batches == 0:
        clear_restarting(trainer)


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """Worker start-up: a terminal's Ctrl-C reaches the whole process group."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def seed_model(seed: int) -> None:
    """Seeds all generators alike on every rank, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)


def mixed(*numbers: int) -> int:
    """One seed from several numbers, different for each combination."""
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_epoch(seed: int, epoch: int) -> None:
    """Seeds torch for an epoch, differently on each rank."""
    torch.manual_seed(mixed(seed, epoch, process_group.rank()))
