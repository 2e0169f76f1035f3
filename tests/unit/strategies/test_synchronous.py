"""Synchronous pipelines under a Trainer: what it sees, saves and is told, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.schedule import Plan
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    dense_layers,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run

SAMPLES, BATCH = 44, 12


def make_net() -> Net:
    """Nothing in it depends on how a minibatch is cut."""
    torch.manual_seed(11)
    layers = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(),
        nn.Linear(12, CLASSES),
    )  # fmt: skip
    return Net(layers)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Dense(SAMPLES), batch_size=BATCH), DataLoader(Dense(9), batch_size=4)


class Steps(pl.Callback):
    """The loss of each step, as it is returned and as it is logged."""

    def __init__(self) -> None:
        self.returned: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.returned.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["loss_step"]))


class Untidy(pl.Callback):
    """Leaves gradients behind, which are none of the step's."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = torch.ones_like(parameter)


def fitted(strategy: Any, folder: Path | None, devices: int = 1) -> tuple[Any, ...]:
    steps, net = Steps(), make_net()
    options: dict[str, Any] = {
        **QUIET,
        "max_epochs": 2,
        "callbacks": [steps, Untidy()],
        "devices": devices,
    }
    trainer = pl.Trainer(**options, **({} if strategy is None else {"strategy": strategy}))
    trainer.fit(net, *loaders())
    if folder is not None:
        trainer.save_checkpoint(folder / "saved.ckpt")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(net.layers), metrics, steps.returned, steps.logged


def in_stages(rank: int, folder: Path) -> tuple[Any, ...]:
    strategy = SynchronousPipelineStrategy(
        schedule="1f1b", microbatches=5, config="1-1", cuts=[3], timeout_s=60
    )
    return fitted(strategy, folder, devices=2)


def test_gradients_are_those_of_the_whole_minibatch(tmp_path: Path) -> None:
    """Weights, losses of steps, what is logged and saved, on all ranks; of a plain Trainer."""
    expected, metrics, returned, logged = fitted(None, None)
    for state, told, losses, shown in run(in_stages, 2, tmp_path):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert told == pytest.approx(metrics, rel=1e-5)
        assert losses == pytest.approx(returned, rel=1e-5)
        assert shown == pytest.approx(logged, rel=1e-5)
    again = make_net()
    plain_trainer(max_epochs=2).fit(again, *loaders(), ckpt_path=str(tmp_path / "saved.ckpt"))
    assert weights(again.layers).keys() == expected.keys()
    for name, value in weights(again.layers).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


class Breaking(nn.Module):
    """Fails in its fifth forward, or ends its process there."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.calls, self.dies = 0, dies

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5 and self.dies:
            os._exit(9)
        if self.calls == 5:
            raise ArithmeticError("five")
        return value


def breaking(rank: int, dies: bool) -> None:
    net = make_net()
    net.layers.append(Breaking(dies=dies))
    strategy = SynchronousPipelineStrategy(microbatches=3, config="1-1", cuts=[3], timeout_s=60)
    pl.Trainer(**QUIET, devices=2, max_epochs=1, strategy=strategy).fit(net, loaders()[0])


def test_errors_name_minibatch_and_microbatch() -> None:
    first, last = outcomes(breaking, 2, False, limit_s=60)
    assert isinstance(last.error, ArithmeticError)
    assert "rank 1, stage 1: forward of microbatch 1 of minibatch 1" in last.error.__notes__
    assert first.error is not None
    assert "of minibatch 1" in str(first.error) + "".join(getattr(first.error, "__notes__", ()))


def test_a_rank_that_dies_is_named() -> None:
    first, last = outcomes(breaking, 2, True, limit_s=60)
    assert last.exit_code == 9
    assert isinstance(first.error, TransportError)
    assert "rank 1 (stage 1) is gone" in first.error.message
    assert "microbatch" in first.error.message
    assert "of minibatch 1, broke" in first.error.message


class Weighted(Net):
    """Its batches have weights of classes beside the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        return super().training_step((x, y), batch_idx)


def collate(items: list[Any]) -> Any:
    xs, ys = zip(*items, strict=True)
    return torch.stack(xs), torch.stack(ys), torch.ones(CLASSES)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    strategy = SynchronousPipelineStrategy(microbatches=2)
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=1, strategy=strategy)
    loader = DataLoader(Dense(8), batch_size=8, collate_fn=collate)
    with pytest.raises(
        ConfigError, match=r"tensor \[0\] has 8 samples, but its tensor \[2\] has 4"
    ) as e:
        trainer.fit(Weighted(dense_layers()), loader)
    assert "cutting minibatch 0" in e.value.__notes__[0]


REFUSED: dict[str, Callable[[], Any]] = {
    "unknown synchronous schedule 'naive'": lambda: SynchronousPipelineStrategy(schedule="naive"),  # type: ignore[arg-type]
    "microbatches=0 is not a valid number": lambda: SynchronousPipelineStrategy(microbatches=0),
    "less than 3, the number of devices of stage 1": lambda: spans(2),
}


def spans(microbatches: int) -> Any:
    plan = Plan.of(config="2-3-1", cuts=[2, 4], num_layers=6)
    return SynchronousPipelineStrategy(microbatches=microbatches).spans_of(plan, nn.Sequential())


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        REFUSED[message]()
    assert message in refused.value.message
    assert refused.value.remedy


def test_settings_that_suit_the_plan_are_accepted() -> None:
    assert spans(3) == ((), (), ())


def test_one_microbatch_on_one_device_is_a_plain_run() -> None:
    strategy = SynchronousPipelineStrategy(microbatches=1)
    ours, theirs = fitted(strategy, None), fitted(None, None)
    assert strategy.pipeline is None
    assert ours[1:] == theirs[1:]
    assert all(torch.equal(value, theirs[0][name]) for name, value in ours[0].items())


class Masked(Net):
    """Its loss is a mean over selected samples: none, in the second and third microbatch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.layers(x)
        mask = (y > 2 - batch_idx % 2) & (y > logits.argmax(1) - 9)
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "weight": mask.sum()}


def weighted(rank: int, strategy: Any = None) -> Any:
    net = Masked(make_net().layers.double())
    data = Dense(24)
    data.x = data.x.double()
    options = {"devices": 1} if strategy is None else {"devices": 3, "strategy": strategy}
    trainer = pl.Trainer(**QUIET, max_epochs=2, **options)
    trainer.fit(net, DataLoader(data, batch_size=12))
    return weights(net.layers), float(trainer.callback_metrics["loss_epoch"])


def test_returned_weights_are_those_of_microbatches_on_replicas() -> None:
    expected, loss = weighted(0)
    strategy = SynchronousPipelineStrategy(microbatches=6, config="1-2", cuts=[3], timeout_s=60)
    for state, told in run(weighted, 3, strategy):
        torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-9)
        assert told == pytest.approx(loss)
