"""Random numbers: the same model on every rank, other dropout masks on each."""

from __future__ import annotations

import numpy as np
import pytorch_lightning as pl
import torch

from sparsepipe.runtime.collectives import process_group


def seed_model(seed: int) -> None:
    """Seeds all generators alike on every rank, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)


def mixed(*numbers: int) -> int:
    """One seed from several numbers, another for each of their combinations."""
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_epoch(seed: int, epoch: int) -> None:
    """Seeds torch for an epoch, differently on each rank."""
    torch.manual_seed(mixed(seed, epoch, process_group.rank()))
