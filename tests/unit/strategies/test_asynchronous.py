"""With one minibatch an epoch every stage has fresh weights, so a pipeline is one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from tests.support.pipeline_cases import (
    Net,
    dense_layers,
    make_loader,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import run

PLANS: Mapping[str, list[int]] = {"1-1": [3], "1-1-1": [2, 5]}


EPOCHS = 3


class Case(Net):
    """A net whose optimizer and schedule a test chooses."""

    def __init__(self, optimizer: str, schedule: str, bounds: Sequence[int]) -> None:
        torch.manual_seed(11)
        super().__init__(dense_layers(), optimizer=optimizer)
        self._schedule = schedule
        self._bounds = [0, *bounds, len(self.layers)]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, **self._scheduler(optimizer)}

    def _scheduler(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._schedule == "":
            return {}
        made: LRScheduler | ReduceLROnPlateau
        if self._schedule == "plateau":
            made = ReduceLROnPlateau(optimizer, patience=0, threshold=0.9, factor=0.5)
        else:
            made = StepLR(optimizer, 2, gamma=0.5)
        interval = self._schedule if self._schedule == "step" else "epoch"
        config = {"scheduler": made, "interval": interval, "monitor": "val_loss"}
        return {"lr_scheduler": config}


class ClippedByStage(Case):
    """What the documents say of clipping by norm, on one device."""

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        if self.trainer.world_size > 1:
            super().configure_gradient_clipping(optimizer, **options)
            return
        for first, end in zip(self._bounds, self._bounds[1:], strict=False):
            stage = self.layers[first:end]
            nn.utils.clip_grad_norm_(stage.parameters(), options["gradient_clip_val"])


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the Trainer and the module."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    schedule: str = ""
    module: type[Case] = Case
    stops: bool = False
    overfits: bool = False


CASES = {
    "nothing": TrainingOptions(),
    "adam": TrainingOptions(optimizer="adam"),
    "groups": TrainingOptions(optimizer="groups"),
    "by value": TrainingOptions({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "by norm": TrainingOptions({"gradient_clip_val": 0.05}, module=ClippedByStage),
    "bf16": TrainingOptions({"precision": "bf16-mixed"}),
    "step": TrainingOptions(schedule="step", optimizer="decay"),
    "epoch": TrainingOptions(schedule="epoch", optimizer="decay"),
    "plateau": TrainingOptions(schedule="plateau"),
    "overfit": TrainingOptions(overfits=True),
    "early": TrainingOptions(stops=True),
}


class Epochs(pl.Callback):
    """Keeps what each epoch logged, and its learning rates."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.piped = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        groups = trainer.optimizers[0].param_groups
        self.piped = getattr(trainer.strategy, "pipeline", None) is not None
        self.seen.append((metrics, [g["lr"] for g in groups]))


@dataclass(frozen=True)
class Found:
    """What a run came to."""

    weights: Mapping[str, Tensor]
    epochs: Sequence[Any]
    best: tuple[str, float]
    steps: int
    piped: bool


def train(rank: int, config: str | None, bounds: list[int], directory: Path) -> dict[str, Found]:
    """All cases with one minibatch an epoch, one after the other."""
    return {name: train_one(name, config, bounds, directory) for name in CASES}


def train_one(name: str, config: str | None, bounds: list[int], directory: Path) -> Found:
    asked = CASES[name]
    net = asked.module(asked.optimizer, asked.schedule, bounds)
    keeper = ModelCheckpoint(
        directory / (config or "plain") / name, filename="{epoch}", monitor="val_loss"
    )
    callbacks: list[pl.Callback] = [epochs := Epochs(), keeper]
    if asked.stops:
        callbacks.append(EarlyStopping("val_loss", min_delta=0.1, patience=0))
    options = {
        "max_epochs": 3 * EPOCHS if asked.stops else EPOCHS,
        "enable_checkpointing": True,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        **({"overfit_batches": 1} if asked.overfits else {"limit_train_batches": 1}),
        **asked.trainer,
    }
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, bounds, **options)
    )
    torch.manual_seed(5)
    trainer.fit(
        net,
        make_loader("dense", batches=5, shuffle=not asked.overfits),
        make_loader("dense", batches=2, seed=3),
    )
    assert keeper.best_model_score is not None
    best = Path(keeper.best_model_path).name, float(keeper.best_model_score)
    return Found(weights(net), epochs.seen, best, trainer.global_step, epochs.piped)


@pytest.fixture(scope="module", params=["1-1", pytest.param("1-1-1", marks=pytest.mark.full)])
def runs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases on one device, and in all ranks of a pipeline."""
    config, directory = request.param, tmp_path_factory.mktemp("runs")
    bounds = PLANS[config]
    (plain,) = run(train, 1, None, bounds, directory)
    return plain, run(train, len(bounds) + 1, config, bounds, directory, limit_s=120)


@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(runs: Any, name: str) -> None:
    plain: Found = runs[0][name]
    assert plain.steps >= 2
    for found in (rank[name] for rank in runs[1]):
        check_equal(found, plain)


def check_equal(found: Found, plain: Found) -> None:
    assert (found.piped, plain.piped) == (True, False)
    assert found.epochs == plain.epochs
    assert (found.best, found.steps) == (plain.best, plain.steps)
    differ = [n for n, v in found.weights.items() if not torch.equal(v, plain.weights[n])]
    assert not differ


def test_cases_do_what_they_are_named_after(runs: Any) -> None:
    """Else equality would say little: each differs from what is left out in it."""
    plain: dict[str, Found] = runs[0]

    def differs(name: str) -> bool:
        other = plain["nothing"].weights
        return any(not torch.equal(v, other[n]) for n, v in plain[name].weights.items())

    def rates(name: str) -> list[float]:
        return [options[0] for _, options in plain[name].epochs]

    for name in ("by value", "by norm", "bf16", "plateau", "overfit"):
        assert differs(name), name
    assert rates("step") == rates("epoch")
    assert plain["early"].steps < 3 * EPOCHS
