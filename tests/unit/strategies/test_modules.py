"""Modules, loaders and callbacks of many kinds, under a pipeline as under a plain Trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelSummary
from torch import Tensor

from sparsepipe.strategies import PipelineStrategy
from tests.support.pipeline_cases import (
    Net,
    dense_layers,
    make_loader,
    make_net,
    pipeline_trainer,
    plain_trainer,
)
from tests.support.processes import outcomes, run


class Exemplary(Net):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(dense_layers())
        self.example_input_array = torch.ones(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Told(ModelSummary):
    """Lightning's summary; keeps what it would print."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def summarize(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().summarize(*args, **options)
        self.found.append((*args, options))


def as_lightning_has_it(rank: int, directory: Path, pipelined: bool) -> Any:
    """A Trainer with a summary, a progress bar, a logger and checkpoints."""
    told = Told()
    options: dict[str, Any] = {"devices": 1}
    if pipelined:
        options = {"devices": 2, "strategy": PipelineStrategy(cuts=[3], timeout_s=60)}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, default_root_dir=directory, callbacks=[told], **options
    )
    net, loader = Exemplary(), make_loader("dense", batches=5)
    trainer.fit(net, loader, make_loader("dense", batches=2))
    assert all("on_fit_start" not in vars(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    tested = trainer.test(net, loader, ckpt_path="best", verbose=False)
    best = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    return told.found, tested, best


def test_a_trainer_with_lightnings_defaults(tmp_path: Path) -> None:
    """The summary is of the whole network, and the best checkpoint can be tested."""
    ((summary, *_),) = run(as_lightning_has_it, 1, tmp_path / "plain", False)
    assert summary[0][1] == sum(p.numel() for p in Exemplary().parameters())
    assert "[2, 6]" in str(summary)
    first, second = run(as_lightning_has_it, 2, tmp_path / "pipeline", True)
    assert (first[0], second[0]) == (summary, [])
    assert first[1:] == second[1:]
    best = plain_trainer().test(
        Exemplary(), make_loader("dense", batches=5), ckpt_path=first[2], verbose=False
    )
    assert first[1] == best


class Terminates(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(rank: int) -> None:
    trainer = pipeline_trainer("1-1", [3], max_epochs=1, callbacks=[Terminates()])
    try:
        trainer.fit(make_net("dense"), make_loader("dense", batches=60))
    finally:
        assert 2 < trainer.global_step < 60


def test_a_signal_to_one_rank_ends_all() -> None:
    ends = outcomes(terminated, 2, limit_s=60)
    assert ["SIGTERMException" in repr(end.error) for end in ends] == [True, True]
