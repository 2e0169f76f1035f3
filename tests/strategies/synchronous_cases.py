"""What ranks of a synchronous pipeline train, and how one process does the same."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from drop_nets import drop_layers, norm_drop_layers, sparse_drop_layers
from normless_nets import normless_layers, sparse_normless_layers
from pipeline_cases import BATCH as DEALT
from pipeline_cases import (
    LAYERS,
    OPTIMIZERS,
    QUIET,
    Dense,
    Net,
    Sparse,
    collate_sparse,
    dealt,
    dense_layers,
    frozen_layers,
    grouped,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from sparsepipe.runtime.randomness import KeyedRandomness
from sparsepipe.strategies import SynchronousPipelineStrategy

BATCH = 17
SEED = 5


NETS = {
    **LAYERS,
    "normless": normless_layers,
    "sparse_normless": sparse_normless_layers,
    "bare": dense_layers,
    "frozen": frozen_layers,
    "drop": drop_layers,
    "norm_drop": norm_drop_layers,
    "sparse_drop": sparse_drop_layers,
}
SPARSE = ("sparse", "sparse_normless", "sparse_drop", "residual")
CUTS = {
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
    return Net(NETS[case.net](), optimizer=case.optimizer)


def dataset(case: Case) -> Any:
    if case.dealt:
        return Dense(case.dealt * DEALT)
    return (Sparse if case.net in SPARSE else Dense)(case.samples)


def collated(case: Case, items: list[Any]) -> Any:
    return collate_sparse(items) if case.net in SPARSE else default_collate(items)


def train(rank: int, cases: Sequence[Case]) -> list[Any]:
    """Each case's weights, the epoch's loss, the last step's, and most microbatches in flight."""
    return [train_one(case, rank) for case in cases]


def train_one(case: Case, rank: int = 0, *, callbacks: Sequence[pl.Callback] = ()) -> Any:
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    net = make_net(case)
    trainer = pl.Trainer(
        **QUIET,
        devices=sum(case.replicas),
        max_epochs=case.epochs,
        gradient_clip_val=case.clip,
        precision=case.precision,
        strategy=SynchronousPipelineStrategy(
            schedule=case.schedule,
            microbatches=case.microbatches,
            batch_norm=case.batch_norm,
            config=case.config,
            cuts=case.cuts,
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


class Accumulation:
    """The oracle: gradient accumulation in one process, over microbatches made of the samples.

    A stage has a copy for each of its replicas, since batch norms see other microbatches, and a
    gradient that is summed up in parts.

    Args:
        case: what is trained.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._data = dataset(case)
        self.net = make_net(case)
        bounds = [0, *case.cuts, len(self.net.layers)]
        self._copies = [
            [copy.deepcopy(self.net.layers[a:b]) for _ in range(count)]
            for (a, b), count in zip(pairwise(bounds), case.replicas, strict=True)
        ]
        self._firsts = bounds[:-1]
        self._newest = [
            [nn.Parameter(p.detach().clone()) for p in copies[0].parameters()]
            for copies in self._copies
        ]
        made = OPTIMIZERS.get(case.optimizer, grouped)
        self._optimizer = made([p for own in self._newest for p in own])
        self._random = KeyedRandomness(seed=SEED)
        self._step = 0
        self.losses: list[tuple[float, int]] = []  # of the microbatches of the last epoch
        self.norms: list[float] = []  # of gradients that were to be clipped
        self.step_loss = 0.0

    def train(self) -> None:
        for epoch in range(self._case.epochs):
            self.losses = []
            for batches in self._rounds(epoch):
                self._minibatch(batches)
            self._agree()

    def _rounds(self, epoch: int) -> Iterator[list[list[int]]]:
        """Samples of each reader in a step; of the first ones in a partial last round."""
        readers = self._case.replicas[0]
        if self._case.dealt:
            batches = [[b * DEALT + i for i in range(DEALT)] for b in range(self._case.dealt)]
            yield from (batches[i : i + readers] for i in range(0, len(batches), readers))
            return
        mine = [list(range(len(self._data)))]
        if readers > 1:
            mine = []
            for reader in range(readers):
                # As Lightning makes them.
                sampler = DistributedSampler(
                    self._data, num_replicas=readers, rank=reader, seed=SEED
                )
                sampler.set_epoch(epoch)
                mine.append(list(sampler))
        for first in range(0, len(mine[0]), BATCH):
            yield [samples[first : first + BATCH] for samples in mine]

    def _minibatch(self, batches: list[list[int]]) -> None:
        total, readers = self._case.microbatches, self._case.replicas[0]
        shares: list[tuple[list[int], float]] = [([], 0.0)] * total
        for reader, samples in enumerate(batches):
            own = range(reader, total, readers)
            # As torch.tensor_split does: as even as can be, the larger ones first.
            cuts = torch.tensor_split(torch.tensor(samples), len(own))
            for number, part in zip(own, cuts, strict=True):
                shares[number] = part.tolist(), len(part) / len(samples) / len(batches)
        losses = {
            number: self._forward(number, samples) * weight
            for number, (samples, weight) in enumerate(shares)
            if samples
        }
        for number in reversed(losses) if self._case.schedule == "gpipe" else losses:
            losses[number].backward()
        self.step_loss = sum(float(loss.detach()) for loss in losses.values())
        for number, loss in losses.items():
            samples, weight = shares[number]
            self.losses.append((float(loss.detach()) / weight, len(samples)))
        self._update()
        self._step += 1

    def _forward(self, number: int, samples: list[int]) -> Tensor:
        value, labels = collated(self._case, [self._data[i] for i in samples])
        keyed = self._case.keyed
        with self._random.preserved():
            for first, copies in zip(self._firsts, self._copies, strict=True):
                for place, layer in enumerate(copies[number % len(copies)]):
                    if keyed:
                        u = self._step * self._case.microbatches + number
                        self._random.key(minibatch=u, layer=first + place)
                    value = layer(value)
        return F.cross_entropy(value, labels)

    def _update(self) -> None:
        for newest, copies in zip(self._newest, self._copies, strict=True):
            for parameter, *every in zip(newest, *(c.parameters() for c in copies), strict=True):
                gradients = [p.grad for p in every if p.grad is not None]
                if not gradients:
                    assert not any(p.requires_grad for p in every)
                    continue
                total = gradients[0]
                for other in gradients[1:]:
                    total = total + other
                parameter.grad = total
        if self._case.clip is not None:
            own = [p for group in self._optimizer.param_groups for p in group["params"]]
            self.norms.append(float(nn.utils.clip_grad_norm_(own, self._case.clip)))
        self._optimizer.step()
        for newest, copies in zip(self._newest, self._copies, strict=True):
            for parameter, *every in zip(newest, *(c.parameters() for c in copies), strict=True):
                for other in every:
                    other.data.copy_(parameter.detach())
                    other.grad = None

    def _agree(self) -> None:
        """At an epoch's end: all replicas have the mean of their statistics."""
        for copies in self._copies:
            for buffers in zip(*(layers.buffers() for layers in copies), strict=True):
                if buffers[0].is_floating_point():
                    agreed = torch.stack([b.double() for b in buffers]).mean(0)
                else:
                    agreed = torch.stack(buffers).amax(0)
                for buffer in buffers:
                    buffer.copy_(agreed)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers under the names of the whole Sequential."""
        layers = [layer for copies in self._copies for layer in copies[0]]
        return {
            f"{number}.{name}": value
            for number, layer in enumerate(layers)
            for name, value in layer.state_dict().items()
        }
