"""Checkpoints are whole: any plan, or a plain Trainer, goes on from those of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.strategies import (
    DataParallelStrategy,
    PipelineStrategy,
    SynchronousPipelineStrategy,
)
from tests.support.pipeline_cases import (
    QUIET,
    make_loader,
    make_net,
    pipeline_trainer,
    plain_trainer,
    weights,
)
from tests.support.processes import outcomes, run
from tests.unit.strategies.test_synchronous import loaders
from tests.unit.strategies.test_synchronous import make_net as make_cuttable_net

CUTS = {"1-1": [3], "2-1": [3], "1-1-1": [2, 5]}


STEPS = 5  # in an epoch


class StartState(pl.Callback):
    """Saves what a run begins with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def train(rank: int, directory: Path, config: str, resumed: Path | None, optimizer: str) -> Any:
    """Three epochs, or what is left of them; the weights in the end."""
    plain = config in ("plain", "dp")
    net = make_net("dense", optimizer=optimizer, step_size=4)
    options: dict[str, Any] = {
        "max_epochs": 3,
        "enable_checkpointing": True,
        "callbacks": [
            StartState(directory / "start.ckpt"),
            ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1),
            ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=3),
        ],
    }
    if config == "dp":
        options.update(devices=2, strategy=DataParallelStrategy(timeout_s=60))
    trainer = (
        plain_trainer(**options) if plain else pipeline_trainer(config, CUTS[config], **options)
    )
    readers = {"plain": 1, "dp": 2}.get(config) or int(config[0])
    trainer.fit(
        net,
        make_loader("dense", batches=STEPS * readers),
        ckpt_path=None if resumed is None else str(resumed),
    )
    return weights(net), trainer.global_step


def ranks_of(config: str) -> int:
    return {"plain": 1, "dp": 2}.get(config) or sum(map(int, config.split("-")))


def start(
    directory: Path, config: str, *, resumed: Path | None = None, optimizer: str = "groups"
) -> Any:
    return run(train, ranks_of(config), directory, config, resumed, optimizer)[0]


def same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal, bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.full
@pytest.mark.parametrize("config", ["2-1", "1-1-1"])
def test_two_epochs_and_one_are_three(config: str, tmp_path: Path) -> None:
    whole, steps = start(tmp_path / "whole", config)
    assert steps == 3 * STEPS
    resumed, again = start(tmp_path / "again", config, resumed=tmp_path / "whole" / "epoch=1.ckpt")
    assert again == steps
    assert same(resumed, whole)


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ("plain", "groups"),
        *(
            pytest.param(config, optimizer, marks=pytest.mark.full)
            for config, optimizer in (
                ("1-1-1", "groups"),
                ("1-1-1", "momentum"),
                ("plain", "momentum"),
                ("dp", "groups"),
                ("dp", "momentum"),
            )
        ),
    ],
)
def test_checkpoints_go_from_plan_to_plan(config: str, optimizer: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    start(source, "2-1", optimizer=optimizer)
    saved = torch.load(source / "epoch=1.ckpt")
    _, steps = start(target, config, resumed=source / "epoch=1.ckpt", optimizer=optimizer)
    assert steps == 3 * STEPS
    begun = torch.load(target / "start.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(begun[part], saved[part]), part
    assert list(begun["state_dict"]) == list(saved["state_dict"])


@pytest.mark.parametrize("source", ["plain", pytest.param("dp", marks=pytest.mark.full)])
def test_checkpoints_of_others_in_a_pipeline(source: str, tmp_path: Path) -> None:
    start(tmp_path / source, source)
    for name in ("epoch=1.ckpt", "step=6.ckpt"):
        saved = torch.load(tmp_path / source / name)
        start(tmp_path / "pipeline", "1-1", resumed=tmp_path / source / name)
        begun = torch.load(tmp_path / "pipeline" / "start.ckpt")
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert same(begun[part], saved[part]), f"{name}: {part}"
        for path in (tmp_path / "pipeline").iterdir():
            path.unlink()


def test_a_checkpoint_within_an_epoch_is_of_a_drained_pipeline(tmp_path: Path) -> None:
    """It holds all updates of its steps, and a run that saves none at that step differs."""
    start(tmp_path, "1-1", optimizer="adam")
    saved = torch.load(tmp_path / "step=3.ckpt")
    counts = {int(entry["step"]) for entry in saved["optimizer_states"][0]["state"].values()}
    assert counts == {3}


def save_afterwards(rank: int, directory: Path, config: str, optimizer: str) -> None:
    """What a script saves when its run has ended, also after an evaluation, and within one."""
    net = make_net("dense", optimizer=optimizer, step_size=4)
    trainer = pipeline_trainer(
        config,
        CUTS[config],
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(directory, filename="{epoch}")],
    )
    loader = make_loader("dense", batches=STEPS * int(config[0]))
    trainer.fit(net, loader)
    trainer.save_checkpoint(directory / "fitted.ckpt")
    trainer.callbacks.append(StateAtEnd(directory / "within.ckpt"))  # type: ignore[attr-defined]
    trainer.validate(net, loader, verbose=False)
    trainer.save_checkpoint(directory / "validated.ckpt")


class StateAtEnd(pl.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [("1-1", "adam"), pytest.param("2-1", "groups", marks=pytest.mark.full)],
)
def test_checkpoints_after_a_run_are_whole(config: str, optimizer: str, tmp_path: Path) -> None:
    run(save_afterwards, ranks_of(config), tmp_path, config, optimizer)
    ordinary = torch.load(tmp_path / "epoch=0.ckpt")
    assert len(ordinary["optimizer_states"][0]["state"]) == 8
    for name in ("fitted", "within", "validated"):
        late = torch.load(tmp_path / f"{name}.ckpt")
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert same(late[part], ordinary[part]), f"{name}: {part}"
    resumed = [
        start(tmp_path / "plain", "plain", resumed=tmp_path / f"{name}.ckpt", optimizer=optimizer)
        for name in ("epoch=0", "fitted")
    ]
    assert same(resumed[0], resumed[1])


class FailsOnTheFirstRank(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            raise ValueError("a bug of somebody's")


def save_after_a_failure(rank: int, path: Path) -> None:
    net = make_net("dense")
    trainer = pipeline_trainer("1-1", CUTS["1-1"], max_epochs=1, callbacks=[FailsOnTheFirstRank()])
    with pytest.raises(ValueError if rank == 0 else TransportError):
        trainer.fit(net, make_loader("dense", batches=STEPS))
    lost = {int(name.split(".")[1]) for name, p in net.named_parameters() if p.isnan().all()}
    assert lost == ({3, 4, 6} if rank == 0 else {0, 1})
    trainer.save_checkpoint(path)


def test_nothing_is_saved_of_a_run_that_failed(tmp_path: Path) -> None:
    for end in outcomes(save_after_a_failure, 2, tmp_path / "failed.ckpt"):
        assert isinstance(end.error, ConfigError), end
        assert "only the values of its own stage" in end.error.message
    assert not (tmp_path / "failed.ckpt").exists()


EPOCHS, SHORT_STEPS = 3, 4  # of an epoch; its last batch is smaller
STRATEGIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: "auto",
    "asynchronous": lambda: PipelineStrategy(config="1-1", cuts=[2], timeout_s=60),
    "synchronous": lambda: SynchronousPipelineStrategy(
        schedule="1f1b", microbatches=5, recompute="all", config="1-1", cuts=[3], timeout_s=60
    ),
}


def train_by(rank: int, directory: Path, how: str, resumed: Path | None) -> dict[str, Tensor]:
    """All epochs, or what is left of them; the weights in the end."""
    net = make_cuttable_net()
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},  # type: ignore[arg-type]
        max_epochs=EPOCHS,
        devices=1 if how == "plain" else 2,
        strategy=STRATEGIES[how](),
        callbacks=[
            StartState(directory / "start.ckpt"),
            ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1),
            ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=6),
        ],
    )
    trainer.fit(net, *loaders(), ckpt_path=None if resumed is None else str(resumed))
    assert trainer.global_step == EPOCHS * SHORT_STEPS
    return weights(net)


def start_by(directory: Path, how: str, resumed: Path | None = None) -> dict[str, Tensor]:
    return run(train_by, 1 if how == "plain" else 2, directory, how, resumed)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the whole minibatch makes of the weights on one device, and what a pipeline does."""
    found = {how: tmp_path_factory.mktemp(how) for how in ("plain", "synchronous")}
    for how, directory in found.items():
        start_by(directory, how)
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", ["epoch=0.ckpt", "step=6.ckpt"])
@pytest.mark.parametrize("target", ["plain", "asynchronous"])
def test_others_go_on_as_from_one_device(
    target: str, name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    """Momentum and steps included: else they would part in the epochs that follow."""
    ended = {}
    for source, directory in saved.items():
        ended[source] = start_by(tmp_path / source, target, directory / name)
        begun, told = torch.load(tmp_path / source / "start.ckpt"), torch.load(directory / name)
        for part in ("state_dict", "optimizer_states", "global_step"):
            assert same(begun[part], told[part]), part
    assert ended["plain"].keys() == ended["synchronous"].keys()
    for weight, value in ended["plain"].items():
        torch.testing.assert_close(ended["synchronous"][weight], value, rtol=1e-5, atol=1e-6)
