"""Random generators of a process and its loaders: their seeds and states."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler

from sparsepipe.runtime.collectives import process_group


def mixed(*numbers: int) -> int:
    """A seed made from several numbers, practically different for each sequence of numbers."""
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_model(seed: int) -> None:
    """Seeds torch, NumPy and Python before the model is built, with one seed on every rank."""
    pl.seed_everything(seed, workers=True, verbose=False)


def seed_epoch(seed: int, epoch: int) -> None:
    """Seeds torch for an epoch, differently on ranks that read different samples."""
    torch.manual_seed(mixed(seed, epoch, process_group.reader()))


def get_randomness() -> dict[str, Any]:
    """The state of this process's random generators, as values that a checkpoint may hold."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def set_randomness(state: dict[str, Any]) -> None:
    """Restores the state that :func:`get_randomness` has returned."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def adapt_loaders(data: pl.LightningDataModule, *, seed: int) -> None:
    """Gives loaders that ``data`` makes their own generators, since draws from torch's global one
    would change dropout masks, and makes their workers ignore Ctrl-C.
    """

    def adapted(hook: Callable[[], Any]) -> Any:
        loaders = hook()
        entries = loaders.flattened if isinstance(loaders, CombinedLoader) else [loaders]
        for loader in pytree.tree_leaves(entries):
            if not isinstance(loader, DataLoader):
                continue
            loader.generator = torch.Generator()
            if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
                loader.sampler.generator = torch.Generator()
            for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
                if generator is not None:
                    generator.manual_seed(mixed(seed, 0))
            if loader.num_workers and not isinstance(loader.worker_init_fn, _IgnoreSignals):
                loader.worker_init_fn = _IgnoreSignals(loader.worker_init_fn)
        return loaders

    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        hook = getattr(data, name)
        setattr(data, name, functools.wraps(hook)(functools.partial(adapted, hook)))


@dataclass(frozen=True, slots=True)
class _IgnoreSignals:
    """A ``worker_init_fn`` that ignores Ctrl-C, which all processes of a terminal get."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)
