"""Random numbers: the same model on every rank, other dropout masks on each."""

from __future__ import annotations

import pytorch_lightning as pl
import torch

from sparsepipe.runtime import group


def seed_model(seed: int) -> None:
    """Seeds all generators alike on every rank, before the model is built."""
    pl.seed_everything(seed, workers=True, verbose=False)


def seed_ranks(seed: int) -> None:
    """Seeds torch differently on each rank, once the model is built."""
    if group.rank():
        torch.manual_seed(seed + 1_000_003 * group.rank())
