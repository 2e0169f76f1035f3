"""Modules, loaders and callbacks of many kinds, under a pipeline as under a plain Trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelSummary
from torch import Tensor, nn
from torch.nn import functional as F

from sparsepipe.strategies import PipelineStrategy
from sparsepipe.strategies.pipeline import RemoteBatch
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


class Headed(Net):
    """Parameters and buffers outside of the Sequential, a dictionary of loaders, extras."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(dense_layers())
        self.head = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.hooks: dict[str, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch["one"]
        logits = self.head(self.layers(x)) + self.head.bias * batch["two"][1].float().mean()
        self.seen += len(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss)
        return {"loss": loss, "extra": logits.sum()}

    def train_dataloader(self) -> Any:
        return {"one": make_loader("dense", batches=4), "two": make_loader("dense", batches=3)}

    def count(self, name: str) -> None:
        self.hooks[name] = self.hooks.get(name, 0) + 1

    def on_before_backward(self, loss: Tensor) -> None:
        self.count("before backward")

    def on_after_backward(self) -> None:
        self.count("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.count("before step")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, RemoteBatch)
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) >= {"loss"}
        self.count("batch end")


def headed(rank: int, config: str | None) -> Any:
    net = Headed()
    options: dict[str, Any] = {"max_steps": 1, "limit_train_batches": 1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
    )
    trainer.fit(net)
    first = weights(net)
    options = {"max_epochs": 2}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
    )
    trainer.fit(net)
    return first, net.hooks, trainer.global_step, float(trainer.callback_metrics["train_loss"])


def test_a_module_with_parts_outside_of_its_layers() -> None:
    """One step is that of one process; the rest runs, with as many updates on each rank."""
    (plain,) = run(headed, 1, None)
    assert plain[1]["after backward"] == 9
    everyone = run(headed, 2, "1-1")
    for first, hooks, steps, _ in everyone:
        assert all(torch.equal(value, plain[0][name]) for name, value in first.items())
        assert steps == 8
        assert {name: hooks[name] for name in ("after backward", "before step", "batch end")} == {
            "after backward": 9,
            "before step": 9,
            "batch end": 9,
        }
    assert [hooks.get("before backward", 0) for _, hooks, _, _ in everyone] == [0, 9]
    assert everyone[0][3] == everyone[1][3]


class Logging(Net):
    """Logs in hooks for batches, of which most ranks have none."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(dense_layers())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("train_number", float(batch_idx), on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("train_square", float(batch_idx**2), on_step=True, on_epoch=True)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("val_number", float(batch_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_square", torch.tensor(float(batch_idx**2)))

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("test_square", float(batch_idx**2))


def logging_in_hooks(rank: int, config: str | None) -> Any:
    net = Logging()
    options: dict[str, Any] = {"max_epochs": 1}
    trainer = (
        plain_trainer(**options) if config is None else pipeline_trainer(config, [3], **options)
    )
    trainer.fit(net, make_loader("dense", batches=5), make_loader("dense", batches=3))
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(net, make_loader("dense", batches=3), verbose=False)[0]
    return {
        name: value
        for name, value in {**fitted, **tested}.items()
        if "number" in name or "square" in name
    }


def test_what_hooks_for_batches_log() -> None:
    (plain,) = run(logging_in_hooks, 1, None)
    assert (plain["train_number"], plain["train_square_epoch"]) == (2.0, 6.0)
    assert plain["val_number"] == 1.0
    assert run(logging_in_hooks, 2, "1-1") == [plain, plain]


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
