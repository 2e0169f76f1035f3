"""Checkpoints of a synchronous pipeline in the hands of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from sparsepipe.strategies import PipelineStrategy, SynchronousPipelineStrategy
from tests.support.pipeline_cases import QUIET, weights
from tests.support.processes import run
from tests.unit.strategies.test_sharding import StartState, same
from tests.unit.strategies.test_synchronous import loaders, make_net

EPOCHS, STEPS = 3, 4  # of an epoch; its last batch is smaller
STRATEGIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: "auto",
    "asynchronous": lambda: PipelineStrategy(config="1-1", cuts=[2], timeout_s=60),
    "synchronous": lambda: SynchronousPipelineStrategy(
        schedule="1f1b", microbatches=5, recompute="all", config="1-1", cuts=[3], timeout_s=60
    ),
}


def train(rank: int, directory: Path, how: str, resumed: Path | None) -> dict[str, Tensor]:
    """All epochs, or what is left of them; the weights in the end."""
    net = make_net()
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
    assert trainer.global_step == EPOCHS * STEPS
    return weights(net)


def start(directory: Path, how: str, resumed: Path | None = None) -> dict[str, Tensor]:
    return run(train, 1 if how == "plain" else 2, directory, how, resumed)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the whole minibatch makes of the weights on one device, and what a pipeline does."""
    found = {how: tmp_path_factory.mktemp(how) for how in ("plain", "synchronous")}
    for how, directory in found.items():
        start(directory, how)
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
        ended[source] = start(tmp_path / source, target, directory / name)
        begun, told = torch.load(tmp_path / source / "start.ckpt"), torch.load(directory / name)
        for part in ("state_dict", "optimizer_states", "global_step"):
            assert same(begun[part], told[part]), part
    assert ended["plain"].keys() == ended["synchronous"].keys()
    for weight, value in ended["plain"].items():
        torch.testing.assert_close(ended["synchronous"][weight], value, rtol=1e-5, atol=1e-6)
