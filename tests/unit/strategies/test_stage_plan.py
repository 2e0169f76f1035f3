"""Plans from a strategy's options; measuring the layers changes nothing of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from sparsepipe.strategies import PipelineStrategy
from sparsepipe.strategies.pipeline.stage_plan import (
    costs_of,
    find_layers,
    flop_costs,
    make_plan,
)
from tests.support.pipeline_cases import (
    BATCH,
    QUIET,
    Dense,
    Net,
    dense_layers,
    make_loader,
    make_net,
    plain_trainer,
)
from tests.support.processes import run


def test_costs_of_layers() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 3))
    assert costs_of("parameters", None, None, net) == [50, 20, 0, 33]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    assert flop_costs(net, torch.randn(8, 4, generator=torch.Generator())) == [
        2 * 8 * 4 * 10,
        0,
        0,
        2 * 8 * 10 * 3,
    ]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())


def test_plans() -> None:
    assert make_plan((2, 1), cuts=[4], costs=list, num_layers=7).stages[0].layers == (0, 3)
    # Two replicas take twice as much as one.
    plan = make_plan((2, 1), cuts=None, costs=lambda: [1.0] * 6, num_layers=6)
    assert (plan.config, plan.cuts) == ("2-1", (4,))
    assert make_plan((3,), cuts=None, costs=list, num_layers=2).cuts == ()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.other = nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())


def test_the_sequential_there_is() -> None:
    assert find_layers(make_net("dense"), None) == "layers"
    outer = nn.Module()
    outer.network = Inner()
    assert find_layers(outer, None) == "network.layers"
    assert find_layers(outer, "network.other") == "network.other"


def balanced(rank: int, balances: list[str]) -> Any:
    """Cuts when a network is trained, and when it is only tested."""
    found = []
    for balance in balances:
        net, loader = make_net("dense"), make_loader("dense", batches=4, shuffle=True)
        strategy = PipelineStrategy(balance=balance, timeout_s=60)  # type: ignore[arg-type]
        trainer = plain_trainer(devices=2, strategy=strategy, max_epochs=1)
        trainer.fit(net, loader)
        trained = strategy.plan.cuts
        trainer.test(net, loader, verbose=False)
        found.append((trained, strategy.plan.cuts))
    return found


def test_balances() -> None:
    """The products of the three linear layers are 96, 192 and 48 a sample."""
    flops, parameters, layers = run(balanced, 2, ["flops", "parameters", "layers"])[0]
    assert flops[0] == flops[1] == (3,)
    assert parameters[0] == (3,)
    assert layers[0] == (4,)


class Noisy(Dense):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(6 * BATCH)
        self.draw = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.rand(6, generator=self.draw), y


class Transferred(Net):
    """Its steps want what the hooks for batches make."""

    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.seen: list[Tensor] = []
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": x, "y": y}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch["x"].device == self.device
        return batch["x"], batch["y"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, tuple):
            self.seen.append(batch[0])


def trainer(devices: int) -> pl.Trainer:
    strategy = PipelineStrategy(timeout_s=60) if devices > 1 else "auto"
    return pl.Trainer(**QUIET, devices=devices, max_epochs=2, strategy=strategy)


class Stream(IterableDataset[Any]):
    """A stream of known length, with noise from a generator of its own."""

    def __init__(self) -> None:
        self.data = Dense(6 * BATCH)
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(self.data)):
            x, y = self.data[index]
            yield x + float(self.rng.random()), y


class Shifting(Transferred):
    """Draws from a generator of its own before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(8)
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.drawn.append(float(self.rng.random()))
        return super().training_step((x + self.drawn[-1], y), batch_idx)


def drawing(rank: int, devices: int) -> Any:
    torch.manual_seed(5)
    found = []
    for kind in ("loader", "sampler", "stream"):
        draw, data = torch.Generator().manual_seed(9), Noisy()
        loaders: dict[str, DataLoader[Any]] = {
            "loader": DataLoader(data, batch_size=BATCH, shuffle=True, generator=draw),
            "sampler": DataLoader(data, BATCH, sampler=RandomSampler(data, generator=draw)),
            "stream": DataLoader(Stream(), batch_size=BATCH),
        }
        net, fitting = Shifting(), trainer(devices)
        fitting.fit(net, loaders[kind])
        assert net.steps == fitting.global_step == 12
        if devices > 1:
            assert fitting.strategy.plan.cuts == (3,)  # type: ignore[attr-defined]
        found.append((net.seen, net.drawn[-12:]))
    return found


def test_batches_and_draws_are_those_of_one_device() -> None:
    (plain,) = run(drawing, 1, 1)
    for mine, theirs, (expected, shifts) in zip(*run(drawing, 2, 2), plain, strict=True):
        assert len(mine[0]) == len(expected) == 12
        assert all(map(torch.equal, mine[0], expected))
        assert theirs[0] == []
        assert mine[1] == theirs[1] == shifts
