"""Ranks of a grid read their parts of domains' samples only, in training and in evaluations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.data import DomainDataModule, GeneratedVolumes, VolumeDataModule
from sparsepipe.data.volumes.datamodule import VolumeDataset
from sparsepipe.models import DomainSeparation, dsn_2d
from sparsepipe.strategies import DomainStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared

NAMES = ("cad", "scan", "photo")


def data_in(cache: Path, domains: int) -> DomainDataModule:
    source = partial(
        GeneratedVolumes, sizes=(8, 12), channels=1, train_samples=8, test_samples=4, seed=0
    )
    make = partial(
        VolumeDataModule,
        source=source,
        cache_dir=cache,
        batch_size=2,
        num_workers=0,
        val_share=0.5,
    )
    return DomainDataModule({name: make(seed=n) for n, name in enumerate(NAMES[:domains])})


def seen(rank: int, cache: Path, ranks: int, domains: int) -> dict[str, Any]:
    """Metrics, and the shapes that are read of inputs, of each stage."""
    read: dict[str, set[tuple[int, ...]]] = {}
    item = VolumeDataset.__getitem__

    def noting(dataset: VolumeDataset, access: Any) -> dict[str, Any]:
        found = item(dataset, access)
        read.setdefault(trainer.state.stage.value, set()).add(found["input"].shape)
        return found

    torch.manual_seed(0)
    names = NAMES[:domains]
    network = dsn_2d(4, domains=names, decoded=[8, 8], width=0.1, code=5, norm="domain")
    sgd, step_lr = partial(torch.optim.SGD, lr=0.01), torch.optim.lr_scheduler.StepLR
    # A schedule asks for the number of steps, and so for loaders while the strategy is set up.
    schedule = partial(step_lr, step_size=1) if domains > 2 else None
    module = DomainSeparation(network, optimizer=sgd, schedule=schedule).double()
    strategy: Any = "auto" if ranks == 1 else DomainStrategy(grid=[1, 2], timeout_s=20)
    settings = {**QUIET, "num_sanity_val_steps": 1, "max_epochs": 1, "devices": ranks}
    trainer = pl.Trainer(**settings, strategy=strategy, use_distributed_sampler=False)
    with patch.object(VolumeDataset, "__getitem__", noting):
        trainer.fit(module, datamodule=data_in(cache, domains))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(module, datamodule=data_in(cache, domains), verbose=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"read": read, "metrics": metrics}


@pytest.mark.parametrize(("ranks", "domains"), [(2, 2), (4, 2), (4, 3)])
def test_evaluations_read_parts(tmp_path: Path, ranks: int, domains: int) -> None:
    """On one grid that has both domains, on a grid for each, and on grids of one and of two."""
    (alone,) = run_shared(seen, 1, tmp_path, 1, domains)
    stages = {"sanity_check", "train", "validate", "test"}
    assert alone["read"] == {stage: {(1, 8, 12)} for stage in stages}
    for found in run_shared(seen, ranks, tmp_path, ranks, domains):
        assert found["read"] == {stage: {(1, 8, 6)} for stage in stages}
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
