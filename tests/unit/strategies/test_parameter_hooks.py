"""Hooks of parameters where minibatches are in flight, stages have replicas, and batches are cut.

The oracle changes the same gradients in ``on_before_optimizer_step``, once an update.
"""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch import Tensor, nn

from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from sparsepipe.strategies.pipeline.optimizer_step import ParameterHooks
from tests.support.pipeline_cases import (
    QUIET,
    Net,
    dealt,
    dense_layers,
    make_loader,
    pipeline_trainer,
    weights,
)
from tests.support.processes import run_shared

LIMIT = 0.02


class Hooked(Net):
    """Clamps each gradient by a hook, and counts its calls."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(dense_layers())
        self.calls = self.after = 0
        for parameter in self.parameters():
            parameter.register_hook(self._clamped)
            parameter.register_post_accumulate_grad_hook(self._negated)

    def _clamped(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient.clamp(-LIMIT, LIMIT)

    def _negated(self, parameter: Tensor) -> None:
        self.after += 1
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


class Stepping(Net):
    """The same where the optimizer steps."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(dense_layers())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-LIMIT, LIMIT).mul_(0.5)


def training(rank: int, kind: type[Net], config: str, synchronous: bool) -> Any:
    net = kind()
    readers, devices = int(config[0]), sum(map(int, config.split("-")))
    options: dict[str, Any] = {"config": config, "cuts": [3], "timeout_s": 60}
    strategy: Any = PipelineStrategy(**options)
    if synchronous:
        strategy = SynchronousPipelineStrategy(microbatches=2, **options)
    trainer = pl.Trainer(**QUIET, devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(net, dealt(6, readers=readers, reader=rank if rank < readers else 0))
    return weights(net.layers), getattr(net, "calls", 0), getattr(net, "after", 0)


@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("config", ["1-1", "2-1"])
def test_hooks_are_called_once_an_update(config: str, synchronous: bool) -> None:
    ranks = sum(map(int, config.split("-")))
    expected = run_shared(training, ranks, Stepping, config, synchronous)[0][0]
    found = run_shared(training, ranks, Hooked, config, synchronous)
    for rank, (layers, calls, after) in enumerate(found):
        assert all(torch.equal(value, expected[name]) for name, value in layers.items())
        first = rank < int(config[0])
        updates = 12 // (int(config[0]) if first or synchronous else 1)
        assert calls == after == updates * (3 if first else 5)  # parameters of the stage


def test_suspended_hooks_are_not_called_and_come_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    called: list[str] = []
    handle = parameter.register_hook(lambda gradient: called.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    hooks = ParameterHooks([parameter])
    hooks.suspend()
    parameter.sum().backward()
    assert not called
    hooks.resume()
    parameter.sum().backward()
    assert called == ["before", "after"]
    handle.remove()
    hooks.assign(parameter, torch.ones(2))
    hooks.assign(parameter, None)
    assert called == ["before", "after", "after"]
    assert parameter.grad is None


class Rate(Net):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(dense_layers())
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def searching(rank: int) -> Any:
    net = Rate()
    trainer = pipeline_trainer("2-1", [3], max_epochs=2)
    found = Tuner(trainer).lr_find(
        net, make_loader("dense", batches=8), num_training=30, max_lr=1e3,
        early_stop_threshold=3.0, update_attr=False,
    )  # fmt: skip
    assert found is not None
    trainer.fit(net, make_loader("dense", batches=8))
    return found.results, trainer.global_step, weights(net.layers)


def test_a_search_for_a_rate_by_replicas_ends_for_all_and_the_training_goes_on() -> None:
    first, *others = run_shared(searching, 3)
    assert 2 < len(first[0]["loss"]) < 30
    assert min(first[0]["loss"]) > 0.1  # no step is reported before it has come back
    assert first[1] == 8
    for results, steps, layers in others:
        assert (results, steps) == (first[0], 8)
        assert all(torch.equal(value, first[2][name]) for name, value in layers.items())
