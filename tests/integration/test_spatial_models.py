"""Every network trains on a grid of ranks, and on replicas of one, as in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from sparsepipe.models import Classifier
from sparsepipe.strategies import SpatialStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run_shared
from tests.support.spatial_networks import CLASSES, GRIDS, Case, cases

STEPS, BATCH = 8, 2
BOUND = 1e-10
LARGER = {"fcn2d": (67, 130)}
"""The deepest batch norm would else have two values of each channel, and blow up their rounding."""
CASES = {case.title: replace(case, size=LARGER.get(case.name, case.size)) for case in cases()}


class Samples(Dataset[dict[str, Any]]):
    """Random samples with labels of each, or of their voxels."""

    def __init__(self, case: Case) -> None:
        count, generator = STEPS * BATCH, torch.Generator().manual_seed(2)
        labelled = case.size if case.head == "segmentation" else ()
        self.x = torch.randn(count, 1, *case.size, dtype=torch.float64, generator=generator)
        self.label = torch.randint(CLASSES, (count, *labelled), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.x[index], "label": self.label[index], "index": index}


def module_of(case: Case, *, checkpointing: bool, draws: bool) -> Classifier:
    torch.manual_seed(0)
    net = case.make(CLASSES, head=case.head, checkpointing=checkpointing).double()
    for parameter in net.parameters():  # some begin at zero
        parameter.data.add_(torch.randn_like(parameter) / math.sqrt(max(parameter[0].numel(), 4)))
    for layer in net.modules() if not draws else ():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
        if hasattr(layer, "probability"):
            layer.probability = 0.0
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-3)
    return Classifier(net, num_classes=CLASSES, optimizer=optimizer)


def trained(
    rank: int, title: str, ranks: int, replicas: int, path: Path | None = None
) -> dict[str, Any]:
    """Weights and statistics after 8 steps.

    One process takes the shares of all replicas one after the other, and adds up their gradients.
    """
    torch.set_num_threads(1)
    case, alone = CASES[title], ranks == 1
    shape = GRIDS[2 if replicas == 2 else 4][len(case.size)]
    module = module_of(case, checkpointing=case.checkpointing and not alone, draws=replicas == 1)
    strategy: Any = "auto" if alone else SpatialStrategy(grid=shape, replicas=replicas)
    trainer = pl.Trainer(
        **QUIET,
        max_steps=STEPS,
        devices=ranks,
        strategy=strategy,
        use_distributed_sampler=False,
        accumulate_grad_batches=replicas if alone else 1,
        num_sanity_val_steps=0,
    )
    data = Samples(case)
    readers, reader = (1, 0) if alone else (replicas, rank * replicas // ranks)
    sampler = DistributedSampler(data, readers, reader, shuffle=False)
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "5")  # to which Lightning's DDP would reset the masks
        trainer.fit(module, DataLoader(data, batch_size=BATCH // replicas, sampler=sampler))
    if path is not None:
        trainer.save_checkpoint(path)
    return {name: value.clone() for name, value in module.layers.state_dict().items()}


def largest_gap(found: dict[str, Any], expected: dict[str, Any], *, statistics: bool) -> float:
    """Of weights, and of running statistics where these are those of one process."""
    gaps = [0.0]
    for name, value in expected.items():
        if (not statistics and "running" in name) or name.endswith("num_batches_tracked"):
            continue
        gap = (found[name] - value).abs().max() / max(float(value.abs().max()), 1e-2)
        gaps.append(float(gap))
    return max(gaps)


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2], ids=["grid", "replicas"])
@pytest.mark.parametrize("title", CASES)
def test_eight_steps_equal_one_process(title: str, replicas: int) -> None:
    (expected,) = run_shared(trained, 1, title, 1, replicas)
    for found in run_shared(trained, 4, title, 4, replicas):
        assert largest_gap(found, expected, statistics=replicas == 1) <= BOUND


@pytest.mark.parametrize("title", ["unet3d segmentation checkpointing"])
def test_a_plain_trainer_goes_on(title: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    run_shared(trained, 4, title, 4, 1, path)
    (expected,) = run_shared(trained, 1, title, 1, 1)
    case = CASES[title]
    module = module_of(case, checkpointing=False, draws=True)
    trainer = pl.Trainer(**QUIET, max_steps=STEPS + 4, num_sanity_val_steps=0)
    loader = DataLoader(Samples(case), batch_size=BATCH)
    weights: list[dict[str, Any]] = []

    class Keep(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            state = module.layers.state_dict()
            weights.append({name: value.clone() for name, value in state.items()})

    trainer.callbacks.append(Keep())  # type: ignore[attr-defined]
    trainer.fit(module, loader, ckpt_path=str(path))
    assert trainer.global_step == STEPS + 4
    assert largest_gap(weights[0], expected, statistics=True) <= BOUND
