"""A pipeline under a Trainer does what one device does, also where a rank breaks at the end."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any, Self

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from sparsepipe.errors import ConfigError, TransportError
from tests.support.pipeline_cases import (
    Net,
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


def features(rank: int, config: str | None, directory: Path) -> dict[str, Any]:
    """Trains with each of the Trainer's ``OPTIONS``; steps, epochs and metrics."""
    found: dict[str, Any] = {}
    for name, given in OPTIONS.items():
        options = dict(given)
        net = make_net("dense")
        callbacks: list[pl.Callback] = [epochs := Epochs()]
        if "patience" in options:
            patience = options.pop("patience")
            callbacks.append(EarlyStopping("val_loss", patience=patience, min_delta=10.0))
        options.update(
            logger=CSVLogger(directory, name=name, version=0),
            log_every_n_steps=1,
            callbacks=callbacks,
        )
        trainer = (
            plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
        )
        trainer.fit(net, make_loader("dense", batches=6), make_loader("dense", batches=2))
        found[name] = (
            trainer.global_step,
            trainer.current_epoch,
            {metric for epoch in epochs.metrics for metric in epoch},
            epochs.metrics,
        )
    return found


@pytest.mark.full
def test_what_trainers_are_asked_for(tmp_path: Path) -> None:
    (plain,) = run(features, 1, None, tmp_path / "plain")
    first, second = run(features, 2, "1-1", tmp_path / "pipeline", limit_s=120)
    assert first == second
    for name, value in plain.items():
        assert first[name][:3] == value[:3], name
    for name in OPTIONS.keys() - {"fast"}:
        logs = [
            tmp_path / way / name / "version_0" / "metrics.csv" for way in ("plain", "pipeline")
        ]
        assert rows(logs[0]) == rows(logs[1]), name


def rows(path: Path) -> list[tuple[str, str, set[str]]]:
    """Where and what was logged of epochs and validations; steps' values lag behind."""
    with path.open() as stream:
        entries = list(csv.DictReader(stream))
    return [
        (entry["step"], entry["epoch"], {name for name, value in entry.items() if value})
        for entry in entries
        if not entry["loss_step"]
    ]


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
    with pytest.raises(ConfigError, match="this rank has the values of its own stage only"):
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
