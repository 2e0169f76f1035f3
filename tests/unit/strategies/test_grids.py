"""Code of the user meets the same samples and gradients on grids of ranks as in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.strategies import SpatialStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET
from tests.support.processes import run, run_shared

SAMPLES = 8


class Drawn(Sampler[int]):
    """A sampler of the user's own, which draws a new order in each epoch."""

    def __init__(self, shuffle: Callable[[list[int]], Any]) -> None:
        self._shuffle = shuffle

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self._shuffle(order)
        return iter(order)


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 4, 4), float(index)), torch.tensor(index)


class Noting(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)))
        self.gradient: Callable[..., Any] = id
        self.read: list[tuple[str, list[int]]] = []

    def _step(self, batch: Any, *_: int) -> Tensor:
        self.read.append((str(self.trainer.state.stage), batch[1].tolist()))
        loss: Tensor = self.layers(batch[0]).square().mean()
        self.gradient(loss)
        return loss

    training_step = validation_step = predict_step = _step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 2},
    "shuffled": lambda: {"batch_size": 2, "shuffle": True},
    "own generator": lambda: {"batch_size": 2, "shuffle": True, "generator": torch.Generator()},
    "drawn by numpy": lambda: {"batch_size": 2, "sampler": Drawn(np.random.shuffle)},
    "drawn by Python": lambda: {"batch_sampler": BatchSampler(Drawn(random.shuffle), 2, False)},
    "drawn with weights": lambda: {"batch_size": 2, "sampler": WeightedRandomSampler([1, 3], 8)},
    "batches of its own": lambda: {"batch_sampler": [[0, 7], [6, 1], [5, 2], [3, 4]]},
}


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one process": lambda: "auto",
    "grid": lambda: SpatialStrategy(grid=(1, 2), timeout_s=60.0),
    "pipeline": lambda: SynchronousPipelineStrategy(
        config="1-1", cuts=[1], grids=[(1, 2), None], microbatches=1, timeout_s=60.0
    ),
}


def read(rank: int, name: str, strategy: str, ranks: int) -> Any:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7 + rank)  # as if the script had not seeded them
    module, loader = Noting(), DataLoader(Numbered(), **LOADERS[name]())
    trainer = pl.Trainer(
        **{**QUIET, "devices": ranks, "max_epochs": 2, "strategy": STRATEGIES[strategy]()}
    )
    trainer.fit(module, loader, loader)
    return module.read


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_is_read_in_its_own_order(name: str) -> None:
    (alone,) = run_shared(read, 1, name, "one process", 1)
    assert run_shared(read, 2, name, "grid", 2) == [alone, alone]
    if name == "shuffled":  # a stage's ranks read through the first one
        assert run_shared(read, 3, name, "pipeline", 3)[-1] == alone


class Seeing(pl.LightningModule):
    """A network whose code looks at gradients as ``name`` says."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4))
        self.head, self.name = nn.Linear(4, 3), name
        self.kept = [torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True)]
        self.double()

    def loss(self, x: Tensor) -> Any:
        high = self.first(x).relu()
        gate = torch.sigmoid(high.mean((2, 3), keepdim=True))
        if self.name == "hooks of activations":
            high, gate = normed(high), normed(gate)
        if self.name == "a retained gradient":
            gate.retain_grad()
        self.gate, self.middle = gate, self.second(high * gate) * self.kept[0]
        return self.head(self.middle.mean((2, 3))).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.x = x = batch[0].requires_grad_()
        loss = self.loss(x)
        return STEPS[self.name](self, x, loss) if self.name in STEPS else loss

    def on_after_backward(self) -> None:
        kept: Any = self.kept[0].grad
        if self.name == "clamped after the backward pass":
            kept.clamp_(-0.003, 0.003)
        elif self.name == "a retained gradient":
            kept.mul_(self.gate.grad.norm())
        elif self.name == "a gradient of samples":
            kept.mul_(self.x.grad.norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.kept], lr=0.1)


def normed(value: Any) -> Any:
    value.register_hook(lambda g: g / g.square().sum().sqrt())
    return value


def signs(parameter: Any) -> None:
    parameter.grad.sign_()


def updated(parameter: Any) -> None:
    optimizer = torch.optim.Adam([parameter], lr=0.01)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


def weighted(loss: Any, *of: Any, create: bool = False) -> Any:
    """As adaptive weights of losses do."""
    found = torch.autograd.grad(loss, of, retain_graph=True, create_graph=create)
    return loss * (1 + sum(each.square().sum().sqrt() for each in found))


def by_hand(net: Any, x: Tensor, loss: Any) -> Any:
    loss.backward(retain_graph=True)
    return loss * net.first.weight.grad.norm()


def adversarial(net: Any, x: Tensor, loss: Any) -> Any:
    (found,) = torch.autograd.grad(loss, x)
    return net.loss((x + 50 * found).detach())


BEFORE: dict[str, Callable[[Any], Any]] = {
    "clamped": lambda net: [
        p.register_hook(lambda g: g.clamp(-0.003, 0.003)) for p in net.parameters()
    ],
    "signs after accumulation": lambda net: [
        p.register_post_accumulate_grad_hook(signs) for p in net.parameters()
    ],
    "an optimizer in the backward pass": lambda net: [*map(updated, net.parameters())],
    "a hook of a module": lambda net: net.second.register_full_backward_hook(lambda *_: None),
}
STEPS: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "a weight by a gradient": lambda net, x, loss: weighted(loss, net.first.weight, net.middle),
    "a penalty": lambda net, x, loss: weighted(loss, net.head.weight, create=True),
    "gradients of samples": adversarial,
    "a second derivative": lambda net, x, loss: weighted(loss, net.first.bias, create=True),
    "backward by hand": by_hand,
}
AFTER = ["clamped after the backward pass", "a retained gradient", "a gradient of samples"]
REFUSED = {
    "a hook of a module": "the backward hook of second would see",
    "backward by hand": "by hand, would see this rank's part",
    "a second derivative": "once_differentiable",
    "a gradient of samples": "grad of a shard would see",
}


def seen(rank: int, name: str, ranks: int, accumulate: int) -> Any:
    net = Seeing(name)
    BEFORE.get(name, id)(net)
    strategy: Any = SpatialStrategy(grid=(1, ranks), timeout_s=60.0) if ranks > 1 else "auto"
    settings: dict[str, Any] = {**QUIET, "accumulate_grad_batches": accumulate, "max_epochs": 2}
    trainer = pl.Trainer(**settings, devices=ranks, strategy=strategy)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 2, 6, 9, generator=draw, dtype=torch.float64)
    try:
        trainer.fit(net, DataLoader(torch.utils.data.TensorDataset(x), 2))
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return [p.detach() for p in (*net.parameters(), *net.kept)]


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 2)])
@pytest.mark.parametrize(
    "name",
    [*BEFORE, *STEPS, "hooks of activations", *AFTER],
)
def test_code_sees_gradients_of_whole_samples(name: str, ranks: int, accumulate: int) -> None:
    found = run_shared(seen, ranks, name, ranks, accumulate)
    if name in REFUSED:
        assert all(REFUSED[name] in text for text in found)
        return
    (alone,) = run_shared(seen, 1, name, 1, accumulate)
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-10)


class Gated(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        gate = super().forward(x).mean((2, 3), keepdim=True)
        gate.register_hook(lambda g: g.sign())  # type: ignore[no-untyped-call]
        return x * gate


def staged(rank: int, what: str) -> str:
    module, grids = Noting(), [None, (1, 2)]
    weight: Any = module.layers[1].weight
    if what == "hook":
        module.layers[1].register_full_backward_hook(lambda *_: None)
    elif what == "activation":
        module.layers[1] = Gated(1, 1, 1)
    elif what == "grad":
        module.gradient = lambda loss: torch.autograd.grad(loss, weight, retain_graph=True)
    strategy: Any = SynchronousPipelineStrategy(
        config="1-1", cuts=[1], grids=grids, microbatches=1, timeout_s=60.0
    )
    settings: dict[str, Any] = {**QUIET, "devices": 3, "max_epochs": 1, "strategy": strategy}
    trainer = pl.Trainer(**settings)
    try:
        trainer.fit(module, DataLoader(Numbered(), batch_size=2))
    except (ConfigError, TransportError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["hook", "activation", "grad"])
def test_parts_of_a_stage_are_refused(what: str) -> None:
    """Which has a grid, so that each rank has parts of its gradients."""
    assert any("would see this rank's part" in text for text in run(staged, 3, what))
