"""Batch norms of ranks that train in microbatches, against one process with the whole minibatch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.pipeline_cases import CLASSES, QUIET, Net, dense_layers, plain_trainer, weights
from tests.support.processes import run
from tests.support.synchronous_cases import Case, loader, make_net


def of(mode: str, config: str, parts: int, schedule: str = "gpipe", **options: Any) -> Case:
    net = options.pop("net", "dense")
    samples = options.pop("samples", 34)
    return Case(config, parts, schedule, net=net, samples=samples, batch_norm=mode, **options)


STOPPED = of("running", "1-1", 3)


def fitted(case: Case, epochs: int, *, ckpt_path: str | None = None) -> tuple[pl.Trainer, Net]:
    strategy = SynchronousPipelineStrategy(
        microbatches=case.microbatches,
        batch_norm=case.batch_norm,  # type: ignore[arg-type]
        config=case.config,
        cuts=case.cuts,
        timeout_s=60,
    )
    trainer = pl.Trainer(
        **QUIET,
        devices=sum(case.replicas),
        max_epochs=epochs,
        strategy=strategy,
    )
    net = make_net(case)
    trainer.fit(net, loader(case, 0), loader(case, 0), ckpt_path=ckpt_path)
    return trainer, net


def saving(rank: int, path: Path) -> tuple[dict[str, Tensor], float, list[str]]:
    """A run of one epoch that leaves a checkpoint."""
    trainer, net = fitted(STOPPED, 1)
    trainer.save_checkpoint(path)
    patched = [name for name, module in net.named_modules() if "forward" in vars(module)]
    assert [type(layer) for layer in net.layers] == [type(layer) for layer in dense_layers()]
    return weights(net), float(trainer.callback_metrics["val_loss"]), patched


def test_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    (state, loss, patched), _ = run(saving, 2, path)
    assert not patched
    # A plain Trainer has the same to load, and normalises by it in evaluation.
    plain = make_net(STOPPED)
    assert state.keys() == plain.state_dict().keys()
    trainer = plain_trainer()
    (told,) = trainer.validate(plain, loader(STOPPED, 0), ckpt_path=str(path), verbose=False)
    assert told["val_loss"] == pytest.approx(loss, rel=1e-6)
    # Another plan goes on as if nothing had happened: a minibatch leaves nothing but buffers.
    alone = dataclasses.replace(STOPPED, config="1")
    _, resumed = fitted(alone, 2, ckpt_path=str(path))
    _, straight = fitted(alone, 2)
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_unknown_norms_are_refused_in_training_only() -> None:
    case = of("deferred", "1", 2)
    net = Net(nn.Sequential(nn.Linear(6, 8), Own(8), nn.Linear(8, CLASSES)))
    strategy = SynchronousPipelineStrategy(microbatches=2, batch_norm="deferred")
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=1, strategy=strategy)
    trainer.validate(net, loader(case, 0), verbose=False)
    with pytest.raises(ConfigError, match=r"layers\.1 is a Own with a forward of its own"):
        trainer.fit(net, loader(case, 0))


def test_another_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_norm='sync' is unknown") as refused:
        SynchronousPipelineStrategy(batch_norm="sync")  # type: ignore[arg-type]
    assert refused.value.remedy == "use one of microbatch, deferred, running"
