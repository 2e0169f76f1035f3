"""Every network trains on a grid of ranks, and on replicas of one, as in one process.

And one process goes on with the checkpoint as if it had trained from the beginning.
"""

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
from tests.support.spatial_networks import CLASSES, GRIDS, Case, cases, networks

STEPS, FURTHER, BATCH = 8, 3, 2
BOUND = 1e-10
LARGER = {"fcn2d": (67, 130)}
"""The deepest batch norm would else have two values of each channel, and blow up their rounding."""
CASES = {
    case.title: replace(case, size=LARGER.get(case.name, case.size))
    for case in [
        *cases(),
        *(
            Case(name, *networks()[name], "classification", checkpointing=True)
            for name in ("convnext_small", "convnext_base", "convnext_large", "convnext_xl")
        ),
    ]
}


class Samples(Dataset[dict[str, Any]]):
    """Random samples with labels of each, or of their voxels.

    After 8 minibatches they are those from the first on again, with which a Trainer begins that
    goes on in the middle of an epoch.
    """

    def __init__(self, case: Case) -> None:
        count, generator = STEPS * BATCH, torch.Generator().manual_seed(2)
        labelled = case.size if case.head == "segmentation" else ()
        self.x = torch.randn(count, 1, *case.size, dtype=torch.float64, generator=generator)
        self.label = torch.randint(CLASSES, (count, *labelled), generator=generator)

    def __len__(self) -> int:
        return 2 * len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index % len(self.x)
        return {"input": self.x[number], "label": self.label[number], "index": number}


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


class Reseed(pl.Callback):
    """Lets draws of a training begin anew where another process goes on with it."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == STEPS:
            torch.manual_seed(9)


def trained(
    rank: int,
    title: str,
    ranks: int,
    replicas: int,
    save: Path | None = None,
    resume: Path | None = None,
) -> dict[int, dict[str, Any]]:
    """Weights and statistics after 8 steps, and in one process after a few more.

    One process takes the shares of all replicas one after the other, and adds up their gradients.

    Args:
        rank: of this process.
        title: of the case.
        ranks: of all replicas of the grid.
        replicas: of it.
        save: where to write a checkpoint after 8 steps.
        resume: a checkpoint to go on with.
    """
    torch.set_num_threads(1)
    case, alone = CASES[title], ranks == 1
    shape = GRIDS[2 if replicas == 2 else 4][len(case.size)]
    module = module_of(case, checkpointing=case.checkpointing and not alone, draws=replicas == 1)
    strategy: Any = "auto" if alone else SpatialStrategy(grid=shape, replicas=replicas)
    found: dict[int, dict[str, Any]] = {}
    data = Samples(case)
    readers, reader = (1, 0) if alone else (replicas, rank * replicas // ranks)
    sampler = DistributedSampler(data, readers, reader, shuffle=False)

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if trainer.global_step in (STEPS, STEPS + FURTHER):
                state = module.layers.state_dict()
                found[trainer.global_step] = {name: each.clone() for name, each in state.items()}

    trainer = pl.Trainer(
        **QUIET,
        max_steps=STEPS + FURTHER if alone else STEPS,
        devices=ranks,
        strategy=strategy,
        use_distributed_sampler=False,
        accumulate_grad_batches=replicas if alone else 1,
        num_sanity_val_steps=0,
        callbacks=[Reseed(), Keep()],
    )
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "5")  # to which Lightning's DDP would reset the masks
        loader = DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)
        trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    return found


def largest_gap(found: dict[str, Any], expected: dict[str, Any], *, statistics: bool) -> float:
    """Of weights, and of running statistics where these are those of one process."""
    gaps = [0.0]
    for name, value in expected.items():
        if (not statistics and "running" in name) or name.endswith("num_batches_tracked"):
            continue
        gap = (found[name] - value).abs().max() / max(float(value.abs().max()), 1e-2)
        gaps.append(float(gap))
    return max(gaps)


QUICK = ("unet3d segmentation checkpointing", 1)


@pytest.mark.parametrize(
    ("title", "replicas"),
    [
        pytest.param(title, replicas, marks=() if (title, replicas) == QUICK else pytest.mark.full)
        for title in CASES
        for replicas in (1, 2)
    ],
)
def test_steps_equal_one_process_which_goes_on_with_the_checkpoint(
    title: str, replicas: int, tmp_path: Path
) -> None:
    path = tmp_path / "whole.ckpt"
    (expected,) = run_shared(trained, 1, title, 1, replicas)
    for found in run_shared(trained, 4, title, 4, replicas, path):
        assert largest_gap(found[STEPS], expected[STEPS], statistics=replicas == 1) <= BOUND
    (further,) = run_shared(trained, 1, title, 1, replicas, None, path)
    end = STEPS + FURTHER
    assert largest_gap(further[end], expected[end], statistics=replicas == 1) <= BOUND
