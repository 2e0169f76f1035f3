"""A slowed device pauses after whatever it computes: forward, backward, update, evaluation.

Layers and optimizer compute for a while and note when; between one computation and the next lies
at least the pause. Other work only makes that longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime import slowdown
from sparsepipe.strategies import DataParallelStrategy, PipelineStrategy, SlowedDeviceStrategy
from tests.support.pipeline_cases import QUIET, Net, make_loader, make_net, weights
from tests.support.processes import run

SLOWDOWN, BUSY_S = 5.0, 0.01


@dataclass(frozen=True)
class Work:
    what: str
    begin_s: float
    end_s: float
    computed_s: float


DONE: list[Work] = []


def work(what: str) -> None:
    """Uses processor time and notes it."""
    begin_s, before_s = time.perf_counter(), time.thread_time()
    while time.thread_time() < before_s + BUSY_S:
        pass
    DONE.append(Work(what, begin_s, time.perf_counter(), time.thread_time() - before_s))


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        work("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        work("backward")
        return gradient


class Busy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(x)  # type: ignore[no-untyped-call, no-any-return]


class BusySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        work("update")
        return loss


class BusyNet(Net):
    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__(nn.Sequential(nn.Linear(6, 4), Busy(), nn.Linear(4, 4)))

    def configure_optimizers(self) -> Any:
        return BusySGD(self.parameters(), lr=0.05)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "dp": lambda: DataParallelStrategy(slowdown=SLOWDOWN),
    "one stage": lambda: PipelineStrategy(slowdown=SLOWDOWN),
    # Keyed draws need the worker, with one rank too.
    "worker": lambda: PipelineStrategy(slowdown=SLOWDOWN, keyed_randomness=True),
    "one device": lambda: SlowedDeviceStrategy(slowdown=SLOWDOWN),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_pauses_follow_what_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    DONE.clear()
    trainer = pl.Trainer(
        **QUIET, strategy=STRATEGIES[name](), devices=1, max_epochs=1, num_sanity_val_steps=0
    )
    net, loader = BusyNet(), make_loader("dense", batches=3)
    trainer.fit(net, loader, loader)
    trainer.test(net, loader, verbose=False)
    trainer.predict(net, loader)
    ended_s = time.perf_counter()
    whats = [one.what for one in DONE]
    assert whats == ["forward", "backward", "update"] * 3 + ["forward"] * 9
    over_s = paused(DONE, ended_s)
    assert min(over_s) >= 0, list(zip(whats, over_s, strict=True))


def paused(done: list[Work], ended_s: float) -> list[float]:
    """Seconds by which what lies between one computation and the next exceeds the pause."""
    begins_s = [one.begin_s for one in done[1:]] + [ended_s]
    return [
        next_s - one.end_s - (SLOWDOWN - 1) * one.computed_s
        for one, next_s in zip(done, begins_s, strict=True)
    ]


def test_full_speed_is_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing pauses; and the tests above could fail: of many gaps one is shorter than a pause."""
    asked_s: list[float] = []
    monkeypatch.setattr(slowdown, "pause", asked_s.append)
    DONE.clear()
    trainer = pl.Trainer(**QUIET, strategy=PipelineStrategy(), devices=1, max_epochs=1)
    trainer.fit(BusyNet(), make_loader("dense", batches=8))
    assert not asked_s
    assert len(DONE) == 3 * 8
    assert min(paused(DONE, time.perf_counter())) < 0


def trained(rank: int, settings: list[tuple[float, float]]) -> list[dict[str, Tensor]]:
    """Weights of two stages after training, with each pair of slowdowns."""
    found = []
    for slowdowns in settings:
        net = make_net("dense", optimizer="momentum")
        strategy = PipelineStrategy(config="1-1", cuts=[3], slowdown=slowdowns[rank], timeout_s=60)
        trainer = pl.Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=2)
        trainer.fit(net, make_loader("dense", batches=6), make_loader("dense", batches=2))
        found.append(weights(net))
    return found


def test_a_slow_rank_changes_no_number() -> None:
    for plain, *slowed in run(trained, 2, [(1.0, 1.0), (1.0, 20.0), (20.0, 1.0)]):
        for other in slowed:
            assert plain.keys() == other.keys()
            assert all(plain[name].equal(other[name]) for name in plain)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input)


def test_synchronised_batch_norm_would_replace_a_forward_of_its_own() -> None:
    module = pl.LightningModule()
    module.norm = OwnNorm(2)
    strategy = DataParallelStrategy()
    trainer = pl.Trainer(strategy=strategy, devices=1, sync_batchnorm=True, **QUIET)
    strategy.connect(module)
    with pytest.raises(ConfigError, match=r"would replace norm, (.|\n)*sync_batchnorm=false"):
        strategy.setup(trainer)
