"""A pipeline under a Trainer does what one device does, also where a rank breaks at the end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Self

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import (
    CLASSES,
    QUIET,
    Dense,
    Net,
    dealt,
    dense_layers,
    make_loader,
    make_net,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run

SPLITS = {"1-1": [3], "2-1": [3], "1-2": [3], "1-1-1": [2, 5], "1": []}


class Epochs(pl.Callback):
    """Keeps what each epoch logged."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def alone(rank: int, kind: str) -> list[Any]:
    found = []
    for keyed in (None, False, True):
        options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5}
        epochs = Epochs()
        options["callbacks"] = [epochs]
        trainer = (
            plain_trainer(**options)
            if keyed is None
            else pipeline_trainer("1", [], keyed_randomness=keyed, **options)
        )
        net = make_net(kind, step_size=3, optimizer="decay")
        loaders = make_loader(kind, batches=5, shuffle=True), make_loader(kind, batches=3)
        torch.manual_seed(5)
        trainer.fit(net, *loaders)
        found.append((weights(net), epochs.metrics, trainer.validate(net, loaders[1])))
    return found


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_one_stage_is_a_plain_trainer_bit_for_bit(kind: str) -> None:
    """Left to Lightning, and through the worker as well; also after ``seed_everything``."""
    ((plain, *rest),) = run(alone, 1, kind, environment={"PL_GLOBAL_SEED": "1"})
    for other in rest:
        assert all(torch.equal(value, other[0][name]) for name, value in plain[0].items())
        assert other[1:] == plain[1:]
    assert plain[1][1]["loss_epoch"] != plain[1][0]["loss_epoch"]


def evaluate(rank: int, kind: str, configs: list[str | None]) -> list[Any]:
    found = []
    for config in configs:
        net = make_net(kind)
        net.eval()
        trainer = plain_trainer() if config is None else pipeline_trainer(config, SPLITS[config])
        before = weights(net)
        loaders = [make_loader(kind, batches=5), make_loader(kind, batches=3, seed=3)]
        found.append(
            (
                trainer.validate(net, loaders[0], verbose=False),
                trainer.test(net, loaders, verbose=False),
                trainer.predict(net, loaders[0]),
            )
        )
        assert all(torch.equal(value, before[name]) for name, value in weights(net).items())
    return found


@pytest.mark.parametrize(
    ("kind", "configs"),
    [
        ("dense", ["1-1"]),
        pytest.param("dense", ["1-1-1", "1-2", "2-1"], marks=pytest.mark.full),
        pytest.param("sparse", ["1-1-1", "2-1"], marks=pytest.mark.full),
    ],
)
def test_evaluation_is_that_of_one_process(kind: str, configs: list[str]) -> None:
    (plain,) = run(evaluate, 1, kind, [None])[0]
    everyone = run(evaluate, sum(map(int, configs[0].split("-"))), kind, configs)
    for rank, found in enumerate(everyone):
        for config, (validated, tested, predicted) in zip(configs, found, strict=True):
            readers = int(config[0])
            if readers == 1:
                assert (validated, tested) == plain[:2]
            else:
                assert validated[0]["val_accuracy"] == plain[0][0]["val_accuracy"]
                assert validated[0] == pytest.approx(plain[0][0], rel=1e-6)
                for ours, theirs in zip(tested, plain[1], strict=True):
                    assert ours == pytest.approx(theirs, rel=1e-6)
            if readers == 1 and rank == 0:
                assert all(map(torch.equal, predicted, plain[2]))
            elif rank < readers:  # of every other sample, hence in other batches
                mine = torch.cat(plain[2])[rank::readers]
                torch.testing.assert_close(torch.cat(predicted), mine)
            else:
                assert predicted == [None] * len(predicted)


OPTIONS: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 4, "max_epochs": 9},
    "limit": {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1},
    "fraction": {"max_epochs": 1, "val_check_interval": 0.5},
    "interval": {"max_epochs": 2, "val_check_interval": 4, "check_val_every_n_epoch": None},
    "seldom": {"max_epochs": 2, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    "fast": {"fast_dev_run": True},
    "time": {"max_epochs": 3, "max_time": {"seconds": 60}},
    "anomaly": {"max_epochs": 1, "detect_anomaly": True},
    "least": {"max_epochs": 4, "min_epochs": 2, "val_check_interval": 2, "patience": 0},
    "early": {"max_epochs": 4, "val_check_interval": 2, "patience": 1},
}


def features(rank: int, config: str | None) -> dict[str, Any]:
    """Trains with each of the Trainer's ``OPTIONS``; steps, epochs and metrics."""
    found: dict[str, Any] = {}
    for name, given in OPTIONS.items():
        options = {**given, "callbacks": [epochs := Epochs()]}
        if "patience" in options:
            patience = options.pop("patience")
            stop = EarlyStopping("val_loss", patience=patience, min_delta=10.0)
            options["callbacks"] = [epochs, stop]
        trainer = (
            plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
        )
        trainer.fit(
            make_net("dense"), make_loader("dense", batches=6), make_loader("dense", batches=2)
        )
        names = {metric for epoch in epochs.metrics for metric in epoch}
        found[name] = (trainer.global_step, trainer.current_epoch, names), epochs.metrics
    return found


@pytest.mark.full
def test_what_trainers_are_asked_for() -> None:
    (plain,) = run(features, 1, None)
    first, second = run(features, 2, "1-1", limit_s=120)
    assert first == second
    for name, (asked, _) in plain.items():
        assert first[name][0] == asked, name


LAYERS = [type(layer) for layer in dense_layers()]


class Leaves(Net):
    """Ends the last rank after the last drain, at one of the times when others still need it."""

    def __init__(self, how: str) -> None:
        super().__init__(dense_layers())
        self._how = how

    def _leave(self, how: str) -> None:
        if self.trainer.global_rank == 1 and how == self._how:
            if how == "raises":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self) -> None:
        self._leave("raises")
        self._leave("killed before connections are closed")

    def cpu(self) -> Self:
        self._leave("killed before modules are put together")
        return super().cpu()


def catching(rank: int, how: str, target: Path) -> tuple[str, list[type[nn.Module]], bool]:
    """A script that goes on after the failure."""
    trainer = pipeline_trainer("1-1", [3], max_epochs=1)
    net = Leaves(how)
    with pytest.raises(TransportError) as told:
        trainer.fit(net, make_loader("dense", batches=4))
    with pytest.raises(ConfigError, match="this rank has only the values of its own stage"):
        trainer.save_checkpoint(target)
    return told.value.message, [type(layer) for layer in net.layers], target.exists()


@pytest.mark.parametrize(
    "how",
    ["raises", "killed before connections are closed", "killed before modules are put together"],
)
def test_a_rank_whose_peers_failed_has_whole_layers_and_saves_nothing(
    tmp_path: Path, how: str
) -> None:
    found = outcomes(catching, 2, how, tmp_path / "half.ckpt", awaited=[0])[0]
    assert found.error is None, str(found)
    message, layers, saved = found.value
    assert message.startswith("rank 1 (stage 1)")
    assert layers == LAYERS
    assert not saved


class Measured(Net):
    """With metrics of every kind, in a collection with groups, and steps of its own."""

    def __init__(self) -> None:
        super().__init__(dense_layers())
        self.many = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES),
                "f1": MulticlassF1Score(CLASSES),
                "auroc": MulticlassAUROC(CLASSES),
            }
        )
        self.mean = MeanMetric()
        self.late: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.layers(x)
        self.many.update(logits, y)
        self.mean.update(logits.mean())
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("batches", 1.0, reduce_fx="sum", batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.many.compute())
        self.log("mean", self.mean.compute())
        self.many.reset()
        self.mean.reset()


def measured(rank: int, config: str | None) -> Any:
    torch.manual_seed(2)
    net = Measured()
    trainer = plain_trainer() if config is None else pipeline_trainer(config, [3])
    readers = 1 if config is None else int(config[0])
    loader = dealt(5, readers=readers, reader=rank if rank < readers else 0)
    first = trainer.validate(net, loader, verbose=False)
    return first, trainer.validate(net, loader, verbose=False)


@pytest.mark.parametrize(
    "config",
    [
        "1-1",
        pytest.param("1-2", marks=pytest.mark.full),
        pytest.param("2-1", marks=pytest.mark.full),
        "2-2",
    ],
)
def test_metrics_are_those_of_one_process(config: str) -> None:
    """Five batches: with two readers the last round is partial."""
    ((plain, again),) = run(measured, 1, None)
    assert plain == again
    for first, second in run(measured, sum(map(int, config.split("-"))), config):
        assert first == second
        assert first[0].keys() == plain[0].keys()
        assert first[0] == pytest.approx(plain[0], rel=1e-6)
        if config == "1-1":
            assert first == plain


class Fails(Net):
    """Raises at some place, when it comes there for the given time."""

    def __init__(self, place: str, time: int) -> None:
        super().__init__(dense_layers())
        self.place, self.left = place, time

    def here(self, place: str) -> None:
        self.left -= place == self.place
        if not self.left:
            raise ValueError("a bug of somebody's")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.here("step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.here("validation")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.here("update")


def failing(rank: int, config: str, place: str, time: int) -> None:
    trainer = pipeline_trainer(config, [3], max_epochs=2, num_sanity_val_steps=0)
    net = Fails(place if rank == trainer.world_size - 1 else "", time)
    trainer.fit(net, make_loader("dense", batches=4), make_loader("dense", batches=3))


@pytest.mark.parametrize(
    ("config", "place", "time", "says"),
    [
        ("1-1", "step", 4, "forward of minibatch 3"),
        ("1-1", "step", 6, "forward of minibatch 5"),  # the second one after a drain
        ("1-1", "update", 6, "update of minibatch 5"),
        ("1-2", "update", 4, "update of the round that begins with minibatch 6"),
        ("1-1", "validation", 5, "forward of batch 1 of the evaluation"),
    ],
)
def test_an_error_names_its_place_and_ends_the_other_ranks(
    config: str, place: str, time: int, says: str
) -> None:
    ranks = sum(map(int, config.split("-")))
    *others, last = outcomes(failing, ranks, config, place, time, limit_s=60)
    assert isinstance(last.error, ValueError)
    assert f"rank {ranks - 1}, stage 1: {says}\n" in last.trace
    assert all(other.error is not None for other in others)
    if says == "forward of minibatch 5":  # messages go by the same numbers
        numbers = re.findall(r"minibatch (\d+)", str(others[0].error))
        assert numbers
        assert min(map(int, numbers)) >= 4
    assert max(last.ended_s, *(other.ended_s for other in others)) < 40


BATCHES = 40


HELD_S = 1.0


class Timed(nn.Module):
    """Notes when it has run in evaluation.

    Args:
        held_s: what its first run takes.
    """

    def __init__(self, held_s: float = 0.0) -> None:
        super().__init__()
        self._held_s = held_s
        self.times: list[float] = []

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.0 if self.times else self._held_s)
            self.times.append(time.monotonic())
        return value


def ends(rank: int, schedule: str | None) -> list[float]:
    """When this rank's stage had run each batch of a validation."""
    torch.manual_seed(0)
    timed = Timed(), Timed(HELD_S)
    net = Net(nn.Sequential(nn.Linear(6, 8), timed[0], nn.Linear(8, CLASSES), timed[1]))
    options: dict[str, Any] = {"config": "1-1", "cuts": [2], "timeout_s": 60}
    strategy: Any
    if schedule is None:
        strategy = PipelineStrategy(**options)
    else:
        strategy = SynchronousPipelineStrategy(schedule=schedule, microbatches=32, **options)
    trainer = pl.Trainer(
        **QUIET, max_epochs=1, devices=2, strategy=strategy, num_sanity_val_steps=0
    )
    trainer.fit(
        net,
        DataLoader(Dense(32), batch_size=32),
        DataLoader(Dense(BATCHES * 4), batch_size=4),
    )
    return timed[rank].times


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", None])
def test_the_first_stage_is_held_back(schedule: str | None) -> None:
    """By a last stage that stays with its first batch.

    Two batches lie in the sender's queue, one waits for room there, one is under way, one lies
    ready, and one is computed.
    """
    first, last = run(ends, 2, schedule)
    assert len(first) == len(last) == BATCHES
    assert sum(end < last[0] for end in first) <= 6
