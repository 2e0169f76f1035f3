"""Updates have the options of their step and one gradient, clipped by the norm of all stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import Precision
from torch import nn

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.strategies import SynchronousPipelineStrategy
from sparsepipe.strategies.sharding import GlobalNorm, clipping_by_norm
from tests.support.pipeline_cases import QUIET, Net, dense_layers, make_loader, pipeline_trainer
from tests.support.processes import outcomes, run
from tests.support.synchronous_cases import Case, loader, make_net, train_one


class Counting(torch.optim.SGD):
    """Keeps a number of its updates in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Evaluates again after a step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return closure()


class Ascending(torch.optim.SGD):
    """Moves uphill first, as sharpness-aware minimisation does, and evaluates there."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)
        return super().step(closure)


class With(Net):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(dense_layers())
        self._make = optimizer

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), lr=0.05)


REFUSED = {
    Twice: "Twice evaluates the network several times",
    Ascending: "Ascending evaluates the network several times or at other weights",
    Counting: "Counting, or a hook of its step, changes the option 'number'",
}


def messages(rank: int) -> list[str]:
    """What each optimizer's first update ends with."""
    found = []
    for kind in REFUSED:
        trainer = pipeline_trainer("1", [], keyed_randomness=True, max_epochs=1)
        with pytest.raises(ConfigError) as refused:
            trainer.fit(With(kind), make_loader("dense", batches=2))
        assert refused.value.remedy
        found.append(refused.value.message)
    return found


def test_optimizers_that_evaluate_by_themselves_are_refused() -> None:
    (found,) = run(messages, 1, environment={"PL_GLOBAL_SEED": "1"})
    for message, expected in zip(found, REFUSED.values(), strict=True):
        assert message.startswith(expected)


LIMIT = 0.05


def of(config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    options = {"net": "dense", "samples": 34, "epochs": 2, **options}
    return Case(config, parts, schedule, clip=LIMIT, **options)


@pytest.mark.full
def test_mixed_precision() -> None:
    """Against one rank, whose norm Lightning takes."""
    case = of("1", 4, precision="bf16-mixed")
    expected, *_ = train_one(case)
    plain, *_ = train_one(dataclasses.replace(case, clip=None))
    assert not all(torch.equal(value, plain[name]) for name, value in expected.items())
    for state, *_ in run(train_one_of, 2, dataclasses.replace(case, config="1-1")):
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def train_one_of(rank: int, case: Case) -> Any:
    return train_one(case, rank)


class Absent(pl.Callback):
    """The first rank does not come to clip."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            vars(pl_module)["configure_gradient_clipping"] = lambda *_, **__: time.sleep(60)


def train_without_the_first(rank: int) -> None:
    case = of("1-1", 2)
    strategy = SynchronousPipelineStrategy(
        microbatches=2, config=case.config, cuts=case.cuts, timeout_s=6
    )
    trainer = pl.Trainer(
        **QUIET,
        devices=2,
        max_epochs=1,
        gradient_clip_val=LIMIT,
        strategy=strategy,
        callbacks=[Absent()],
    )
    trainer.fit(make_net(case), loader(case, rank))


@pytest.mark.full
def test_waits_for_norms_have_a_limit() -> None:
    found = outcomes(train_without_the_first, 2, limit_s=50, awaited=[1], join_group=False)
    last = found[1]
    assert isinstance(last.error, TransportError)
    said = "stage 0) did not take part in taking the norm of all ranks' gradients"
    assert said in str(last.error)
    assert any("update of minibatch 0" in note for note in last.error.__notes__)


def test_clipping_is_replaced_for_an_update_only() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(2)
    norm, plain = GlobalNorm([], given=()), Precision()
    with (
        clipping_by_norm(plain, norm.clip),
        pytest.raises(ConfigError, match=r"shape \(2,\) was added to the optimizer after"),
    ):
        plain.clip_gradients(optimizer, 1.0)
    assert "clip_grad_by_norm" not in vars(plain)
