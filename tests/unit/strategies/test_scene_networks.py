"""Data parallelism and pipelines train a U-Net on voxels that count their points' labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from sparsepipe.models import Classifier, sparse_unet
from sparsepipe.runtime.microbatches import split
from sparsepipe.sparse import sparse_collate
from sparsepipe.strategies import DataParallelStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET, weights
from tests.support.processes import run

CLASSES, BATCH, STEPS, RATE = 3, 4, 3, 0.1


def labeller() -> Classifier:
    layers = sparse_unet(
        CLASSES, in_channels=2, channels=(6, 8, 8, 6), blocks=(1,) * 4, stem_channels=4
    ).double()
    optimizer = partial(torch.optim.SGD, lr=RATE)
    weights, settings = [0.5, 2.0, 1.0], {"num_classes": CLASSES, "lovasz": 0.7}
    return Classifier(layers, optimizer=optimizer, class_weights=weights, **settings)


def scene(number: int) -> tuple[Tensor, Tensor]:
    """Sites of a grid of 8, and features beside counts of each class."""
    draw = torch.Generator().manual_seed(number)
    coords = torch.unique(torch.randint(8, (60, 3), generator=draw), dim=0)
    feats = torch.rand(len(coords), 2, dtype=torch.float64, generator=draw)
    return coords, torch.cat([feats, torch.randint(3, (len(coords), CLASSES), generator=draw)], 1)


def collated(scenes: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    whole = sparse_collate(scenes, spatial_shape=(8, 8, 8))
    label = whole.replace_feats(whole.feats[:, 2:])
    return {"input": whole.replace_feats(whole.feats[:, :2]), "label": label}


def trained(rank: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, scenes = labeller(), [scene(number) for number in range(BATCH * STEPS)]
    strategies: dict[str, Any] = {
        "dp": DataParallelStrategy,
        "cut": lambda: SynchronousPipelineStrategy(
            schedule="1f1b", microbatches=2, config="1-1", cuts=[4], timeout_s=60
        ),
    }
    trainer = pl.Trainer(
        **QUIET,
        devices=2,
        max_epochs=1,
        strategy=strategies[kind](),
        use_distributed_sampler=False,
    )
    ranks = {"num_replicas": 2, "rank": rank} if kind == "dp" else {"num_replicas": 1, "rank": 0}
    sampler = DistributedSampler(scenes, **ranks, shuffle=False)  # type: ignore[arg-type]
    size = BATCH // ranks["num_replicas"]
    trainer.fit(
        module,
        DataLoader(scenes, batch_size=size, sampler=sampler, collate_fn=collated),  # type: ignore[arg-type]
    )
    return weights(module.layers)


@pytest.mark.parametrize("kind", ["dp", "cut"])
def test_a_labeller_learns_as_in_one_process(kind: str) -> None:
    """One process computes two halves of each batch, each with its own statistics, and takes the
    mean of their gradients, in a pipeline weighted by the class weights of their points.
    """
    torch.manual_seed(0)
    module = labeller()
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        scenes = [scene(number) for number in range(step * BATCH, (step + 1) * BATCH)]
        if kind == "dp":
            halves = [collated(scenes[half::2]) for half in (0, 1)]
        else:
            halves = [part.batch for part in split(collated(scenes), 2)]
        optimizer.zero_grad()
        outs: Any = [module.training_step(half, 0) for half in halves]
        sums = [1.0 if kind == "dp" else out["weight"] for out in outs]
        sum(out["loss"] * size / sum(sums) for out, size in zip(outs, sums, strict=True)).backward()
        optimizer.step()
    expected = dict(module.layers.named_parameters())
    for found in run(trained, 2, kind):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-12)
