"""What a run draws at random: before the layers, and within them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.errors import ConfigError
from tests.support.pipeline_cases import (
    CLASSES,
    Net,
    dealt,
    dense_layers,
    make_loader,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run


class Augmented(Net):
    """Draws before the layers, and needs what it drew after them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        order, share = torch.randperm(len(x)), random.random()
        logits = self.layers(x * share + x[order] * (1 - share))
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def augmented(rank: int, config: str | None) -> Any:
    torch.manual_seed(2)
    net = Augmented(dense_layers())
    options: dict[str, Any] = {"max_steps": 1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
    )
    torch.manual_seed(4 + rank)
    random.seed(4 + rank)
    trainer.fit(net, make_loader("dense", batches=1))
    return weights(net)


def test_draws_before_the_layers_are_the_same_after_them() -> None:
    (plain,) = run(augmented, 1, None)
    for state in run(augmented, 2, "1-1"):
        assert all(torch.equal(value, plain[name]) for name, value in state.items())


class Mixing(Net):
    """As :class:`Augmented`, but from a generator of its own; another one on each rank."""

    def __init__(self, seed: int) -> None:
        super().__init__(dense_layers())
        self.rng = np.random.default_rng(seed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        order, share = torch.from_numpy(self.rng.permutation(len(x))), float(self.rng.random())
        logits = self.layers(x * share + x[order] * (1 - share))
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def mixing(rank: int, config: str | None, cuts: list[int]) -> Any:
    torch.manual_seed(2)
    net = Mixing(seed=4 + rank)
    options: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, cuts, **options)
    )
    trainer.fit(net, make_loader("dense", batches=1))
    return weights(net)


def test_a_generator_of_ones_own_draws_the_same_after_the_layers() -> None:
    """One minibatch an epoch, so that every stage trains on fresh weights."""
    (plain,) = run(mixing, 1, None, [])
    for state in run(mixing, 3, "1-1-1", [2, 4]):
        assert all(torch.equal(value, plain[name]) for name, value in state.items())


SEEDED = {"PL_GLOBAL_SEED": "1"}  # as seed_everything leaves it


def dropout_net() -> Net:
    torch.manual_seed(2)
    return Net(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, CLASSES)))


def keyed(rank: int, config: str, cuts: list[int]) -> Any:
    net = dropout_net()
    trainer = pipeline_trainer(config, cuts, keyed_randomness=True, limit_train_batches=1,
                               max_epochs=3)  # fmt: skip
    trainer.fit(net, make_loader("dense", batches=4))
    return weights(net)


def test_keyed_draws_do_not_depend_on_the_plan() -> None:
    """One minibatch an epoch, so that every plan trains on fresh weights."""
    (alone,) = run(keyed, 1, "1", [], environment=SEEDED)
    for config, cuts in (("1-1", [1]), ("1-1-1", [1, 2])):
        for state in run(keyed, len(cuts) + 1, config, cuts, environment=SEEDED):
            assert all(torch.equal(value, alone[name]) for name, value in state.items())


def once(rank: int, seed: int | None) -> Any:
    os.environ.pop("PL_GLOBAL_SEED", None)  # of whatever ran before
    if seed is not None:
        pl.seed_everything(seed, verbose=False)
    net = dropout_net()  # of its own seed
    trainer = pipeline_trainer("1-1", [1], keyed_randomness=True, max_steps=1)
    loader = make_loader("dense", batches=1)
    if seed is None:
        trainer.validate(net, loader, verbose=False)  # nothing is keyed there
    trainer.fit(net, loader)
    return weights(net)


def test_keyed_draws_want_a_seed() -> None:
    """Else every run would have the same masks."""
    for end in outcomes(once, 2, None):
        assert isinstance(end.error, ConfigError), end
        assert "keyed_randomness" in end.error.message
        assert "seed_everything" in end.error.remedy
    one, two, again = (run(once, 2, seed)[0] for seed in (1, 2, 1))
    assert any(not torch.equal(value, two[name]) for name, value in one.items())
    assert all(torch.equal(value, again[name]) for name, value in one.items())


class Still(Net):
    """Learns nothing, so that its loss tells the masks alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def masked(rank: int, config: str, *fits: tuple[int, str, str]) -> list[float]:
    """The last epoch's loss of some fits: how many epochs, a checkpoint to read, one to write."""
    losses = []
    readers = int(config[0])
    loader = dealt(5, readers=readers, reader=rank if rank < readers else 0)
    for epochs, source, target in fits:
        torch.manual_seed(2)
        net = Still(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES)))
        trainer = pipeline_trainer(config, [1], keyed_randomness=True, max_epochs=epochs)
        trainer.fit(net, loader, ckpt_path=source or None)
        if target:
            trainer.save_checkpoint(target)
        losses.append(float(trainer.callback_metrics["loss"]))
    return losses


@pytest.mark.full
def test_keyed_draws_do_not_depend_on_the_readers(tmp_path: Path) -> None:
    """Five minibatches, so that with two readers every epoch ends with a partial round."""
    saved = str(tmp_path / "one.ckpt")
    (one, two), *others = run(masked, 3, "2-1", (1, "", saved), (2, "", ""), environment=SEEDED)
    assert one != two
    assert others == [[one, two]] * 2
    fits = (1, "", ""), (2, "", ""), (2, saved, "")
    found = run(masked, 2, "1-1", *fits, environment=SEEDED)
    assert found == [[one, two, two]] * 2
