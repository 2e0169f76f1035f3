"""Networks and trainings of synchronous pipelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, default_collate

from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import BATCH as DEALT
from tests.support.pipeline_cases import (
    CLASSES,
    LAYERS,
    QUIET,
    Dense,
    Images,
    Net,
    Sparse,
    collate_sparse,
    dealt,
    dense_layers,
    frozen_layers,
    image_layers,
    sparse_layers,
    weights,
)


def drop_layers() -> nn.Sequential:
    """Without batch norms, so that microbatches of one sample will do; draws in three layers."""
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Dropout(0.3),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, CLASSES),
    )


def sparse_drop_layers() -> nn.Sequential:
    return sparse_vgg(11, CLASSES, width=1 / 16, dropout=0.5)


def norm_drop_layers() -> nn.Sequential:
    """With batch norms, draws, and a layer that works in place on what a norm has made."""
    return nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 12, bias=False),
        nn.BatchNorm1d(12, momentum=None),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(12, CLASSES),
    )


GAIN = 3.0
"""Of sparse kernels, lest all vanishes in so many layers."""


def normless_layers() -> nn.Sequential:
    return _without_norms(dense_layers())


def sparse_normless_layers() -> nn.Sequential:
    layers = _without_norms(sparse_layers())
    for name, parameter in layers.named_parameters():
        if name.endswith("kernel"):
            parameter.data *= GAIN
    return layers


def _without_norms(layers: nn.Sequential) -> nn.Sequential:
    for name, module in list(layers.named_modules()):
        if isinstance(module, _BatchNorm):
            layers.set_submodule(name, nn.Identity())
    return layers


BATCH = 17
SEED = 5


NETS = {
    **LAYERS,
    "normless": normless_layers,
    "sparse_normless": sparse_normless_layers,
    "bare": dense_layers,
    "frozen": frozen_layers,
    "drop": drop_layers,
    "image_drop": partial(image_layers, dropout=0.3),
    "norm_drop": norm_drop_layers,
    "sparse_drop": sparse_drop_layers,
}
SPARSE = ("sparse", "sparse_normless", "sparse_drop", "residual", "unet")
IMAGES = ("image", "image_drop")
CUTS = {
    "image": {2: [4], 3: [3, 5]},
    "image_drop": {2: [4], 3: [3, 5]},
    "normless": {1: [], 2: [3], 3: [2, 5], 4: [1, 3, 5]},
    "dense": {1: [], 2: [3], 3: [2, 5], 4: [1, 3, 5]},
    "bare": {3: [2, 3]},
    "frozen": {1: [], 2: [2], 3: [2, 5]},
    "drop": {1: [], 2: [5], 3: [2, 6], 4: [1, 4, 7]},
    "norm_drop": {1: [], 2: [4], 3: [3, 6], 4: [1, 4, 7]},
    "sparse": {1: [], 2: [17], 3: [10, 24], 4: [7, 14, 25]},
    "sparse_normless": {1: [], 2: [17], 3: [10, 24], 4: [7, 14, 25]},
    "sparse_drop": {1: [], 2: [17], 3: [10, 24], 4: [7, 14, 25]},
    "residual": {1: [], 2: [7], 3: [5, 8], 4: [3, 6, 9]},
    "unet": {2: [4], 3: [3, 6]},
}


@dataclass(frozen=True)
class Case:
    config: str
    microbatches: int
    schedule: str = "gpipe"
    net: str = "drop"
    batch_norm: str = "microbatch"
    optimizer: str = "momentum"
    samples: int = 39  # of an epoch: the last batch is smaller
    epochs: int = 2
    dealt: int = 0  # batches of an epoch, whole ones of 4 samples, dealt out in turn
    recompute: Any = "none"
    unkeyed: bool = False  # draws as they come, of nets that draw
    clip: float | None = None  # the norm that gradients are clipped to
    precision: Any = "32-true"
    grids: Any = None  # of each stage

    @property
    def replicas(self) -> list[int]:
        return [int(part) for part in self.config.split("-")]

    @property
    def cuts(self) -> list[int]:
        return CUTS[self.net][len(self.replicas)]

    @property
    def keyed(self) -> bool:
        return self.net.endswith("drop") and not self.unkeyed

    def __str__(self) -> str:
        words = [self.schedule, self.config, f"T{self.microbatches}", self.net, self.optimizer]
        return " ".join(words + ["unkeyed"] * self.unkeyed)


def make_net(case: Case) -> Net:
    torch.manual_seed(11)
    net = Net(NETS[case.net](), optimizer=case.optimizer)
    return net.double() if case.precision == "64-true" else net


def dataset(case: Case) -> Any:
    if case.dealt:
        return Dense(case.dealt * DEALT)
    kinds = {**dict.fromkeys(SPARSE, Sparse), **dict.fromkeys(IMAGES, Images)}
    return kinds.get(case.net, Dense)(case.samples)


def collated(case: Case, items: list[Any]) -> Any:
    return collate_sparse(items) if case.net in SPARSE else default_collate(items)


def train(rank: int, cases: Sequence[Case], **places: Any) -> list[Any]:
    """Each case's weights, the epoch's loss, the last step's, and most microbatches in flight."""
    return [train_one(case, rank, **places) for case in cases]


def train_one(
    case: Case, rank: int = 0, *, callbacks: Sequence[pl.Callback] = (), **places: Any
) -> Any:
    """The same of one case."""
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    net = make_net(case)
    trainer = pl.Trainer(
        **{**QUIET, "devices": sum(case.replicas), **places},
        max_epochs=case.epochs,
        gradient_clip_val=case.clip,
        precision=case.precision,
        strategy=SynchronousPipelineStrategy(
            schedule=case.schedule,
            microbatches=case.microbatches,
            batch_norm=case.batch_norm,
            config=case.config,
            cuts=case.cuts,
            grids=case.grids,
            recompute=case.recompute,
            keyed_randomness=case.keyed,
            timeout_s=60,
        ),
        callbacks=[flown := Flown(), *callbacks],
    )
    trainer.fit(net, loader(case, rank))
    logged = trainer.callback_metrics
    told = {"epoch": float(logged["loss_epoch"]), "step": float(logged["loss_step"])}
    return weights(net.layers), told, flown.most


def loader(case: Case, rank: int) -> DataLoader[Any]:
    readers = case.replicas[0]
    if case.dealt:
        return dealt(case.dealt, readers=readers, reader=rank if rank < readers else 0)
    collate = collate_sparse if case.net in SPARSE else None
    return DataLoader(dataset(case), batch_size=BATCH, collate_fn=collate)


class Flown(pl.Callback):
    """Most microbatches in flight at a time; None where a plain Trainer runs."""

    most: int | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.pipeline is not None:
            self.most = trainer.strategy.pipeline.worker.most_in_flight
