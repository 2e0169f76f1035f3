"""Training loaders that continue within an epoch when a run resumes.

A ``DataLoader`` whose order depends only on the seed and the epoch skips the batches that are done,
if its sampler is SparsePipe's or torch's sequential, random or distributed one. A loader with
``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, gets its state
back. Any other loader starts its epoch again.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import has_iterable_dataset, sized_len
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from sparsepipe.data.dataloaders import TrainSampler
from sparsepipe.errors import CheckpointError
from sparsepipe.runs.randomness import mixed, seed_epoch, set_randomness
from sparsepipe.runtime.collectives import process_group
from sparsepipe.strategies import trainer_internals as internals
from sparsepipe.strategies.pipeline.dataloaders import Padded, has_state
from sparsepipe.utils import reading

log = logging.getLogger(__name__)

STATE_KEY = "RunCheckpoint"
"""Key, in a checkpoint's ``callbacks``, of the place where training resumes."""
_ORDERED = (
    *(SequentialSampler, RandomSampler, DistributedSampler, BatchSampler),
    *(TrainSampler, type(None)),
)
"""Samplers whose order depends only on their generator and ``set_epoch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The place where a run resumes.

    Attributes:
        path: the checkpoint file.
        epoch: the epoch that comes next or is under way, counted from 0.
        batches: number of batches of this epoch that are done.
        steps: number of training steps done, as loggers count them.
        metrics: last validation metrics by name, if the epoch is under way.
        randomness: for each rank, the states of its random generators.
        loaders: for each rank, the state of each of its loaders; None for a loader without state.
        buffers: for each rank, its module's buffers by name, if the epoch is under way.
    """

    path: Path
    epoch: int
    batches: int
    steps: int
    metrics: dict[str, Tensor]
    randomness: list[dict[str, Any]]
    loaders: list[list[Any]]
    buffers: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, content: Mapping[str, Any]) -> Resume:
        """Reads the place from the ``content`` of the checkpoint file ``path`` of a training."""
        remedy = "remove the file to start the run anew"
        with reading.explained(path, "checkpoint of a run", error=CheckpointError, remedy=remedy):
            callbacks = reading.mapping(content.get("callbacks"), "callbacks")
            state = reading.mapping(callbacks.get(STATE_KEY), STATE_KEY)
            epoch, batches = (reading.whole(state.get(key), key) for key in ("epoch", "batches"))
            randomness = reading.listing(state.get("randomness"), "randomness")
        return cls(
            path=path,
            epoch=epoch,
            batches=batches,
            randomness=randomness,
            loaders=state.get("loaders", []),
            buffers=state.get("buffers", []),
            steps=state.get("steps", 0),
            metrics=state.get("metrics", {}),
        )

    def of_rank(self, entries: list[Any]) -> Any:
        """Returns this rank's entry of a list over ranks; None: the number of ranks has changed."""
        if len(entries) != process_group.world_size():
            return None
        return entries[process_group.rank()]


class ResumableLoaders(pl.Callback):
    """Makes the order of batches depend only on (seed, epoch, rank), and resumes within an epoch.

    Args:
        seed: the run's seed.
        resume: where the training resumes; None: it starts anew.

    Attributes:
        loaders: this rank's training loaders.
        obstacle: why this rank's loaders cannot resume within an epoch; None if they can.
        skipped: number of batches to skip, done before the run resumed; 0 after the first step.
    """

    def __init__(self, seed: int, *, resume: Resume | None = None) -> None:
        self.seed, self._resume = seed, resume
        self.skipped = 0 if resume is None else resume.batches
        self.loaders: list[Any] = []
        self.obstacle: str | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            internals.replace_loader_restoration(trainer, partial(self._prepare, trainer))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        resume = self._resume
        if resume is not None and (state := resume.of_rank(resume.randomness)) is not None:
            set_randomness(state)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seed_epoch(self.seed, trainer.current_epoch)
        self._begin(trainer.current_epoch)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._resume, self.skipped = None, 0

    def _prepare(self, trainer: pl.Trainer) -> None:
        """Makes new loaders resume; Lightning calls this before it makes the loaders' iterators."""
        self.loaders = [
            each.loader if isinstance(each, Padded) else each
            for each in internals.loaders_of(trainer.fit_loop)
            if not isinstance(each, Padded) or each.reads
        ]
        self.obstacle = self._find_obstacle()
        resume = self._resume
        epochs: Any = trainer.fit_loop.epoch_progress.current  # ahead of trainer.current_epoch
        self._begin(int(epochs.processed) if resume is None else resume.epoch)
        if resume is None:
            return
        if not resume.batches:
            # Saved at an epoch's end; with ``max_steps`` Lightning would resume within the epoch.
            internals.clear_restarting(trainer)
            return
        if self.obstacle is not None:
            log.warning(
                "the data of this epoch start from its beginning, not after batch %d: %s",
                resume.batches,
                self.obstacle,
            )
            return
        states = resume.of_rank(resume.loaders) or [None] * len(self.loaders)
        for loader, state in zip(self.loaders, states, strict=False):
            if has_state(loader):
                if state is not None:
                    loader.load_state_dict(state)
                continue
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            # A DataLoader does not let its sampler be set as an attribute.
            vars(loader)[name] = _Rest(getattr(loader, name), self)

    def _find_obstacle(self) -> str | None:
        for loader in self.loaders:
            name = type(loader).__name__
            if has_state(loader):
                if sized_len(loader) is None:
                    return f"{name} has no length, so it is read one batch ahead"
            elif (
                not isinstance(loader, DataLoader)
                or has_iterable_dataset(loader)
                or inspect.unwrap(type(loader).__iter__) is not DataLoader.__iter__
            ):
                return f"{name} is not a plain DataLoader of a map-style data set"
            else:
                batches: Any = loader.batch_sampler
                sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
                for each in (batches, sampler):
                    draws_globally = getattr(each, "generator", True) is None
                    if type(each) not in _ORDERED or draws_globally:
                        kind = type(each).__name__
                        return f"the order of {kind} may depend on more than seed and epoch"
        if len({sized_len(loader) for loader in self.loaders}) > 1:
            return "loaders of different lengths are read side by side"
        return None

    def _begin(self, epoch: int) -> None:
        for loader in self.loaders:
            batches = getattr(loader, "batch_sampler", None)
            inner = getattr(batches, "sampler", None)
            for each in (loader, getattr(loader, "sampler", None), batches, inner):
                if each is not loader and callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
                generator = getattr(each, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(mixed(self.seed, epoch))


class _Rest:
    """Wraps a sampler; its first epoch begins after the batches that earlier processes read."""

    def __init__(self, whole: Any, loaders: ResumableLoaders) -> None:
        self._whole, self._loaders = whole, loaders

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        # With worker processes, iterators are made twice; only the one that is read gets here.
        yield from itertools.islice(self._whole, self._loaders.skipped, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
