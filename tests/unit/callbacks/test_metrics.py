"""What an epoch has logged is of all its batches, also of those before a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.aggregation import MaxMetric, SumMetric

from sparsepipe.callbacks import EpochSums

VALUES = (4.1, 9.7, 1.3, 2.1, 3.3, 5.9)
"""Of the batches; the largest and the smallest come first."""


class Seen(Metric):
    """A metric whose states nobody knows how to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value: float) -> None:
        self.last = torch.tensor(value)

    def compute(self) -> torch.Tensor:
        return self.last


class Logging(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.total, self.most, self.seen = SumMetric(), MaxMetric(), Seen()

    def training_step(self, batch, batch_idx):
        value = VALUES[batch_idx]
        for how in ("mean", "sum", "max", "min"):
            self.log(how, value, on_step=how == "sum", on_epoch=True, reduce_fx=how,
                     batch_size=batch_idx + 1)  # fmt: skip
        self.total(value)
        self.most(value)
        self.log("total", self.total, on_epoch=True)
        self.log("total_again", self.total, on_epoch=True, on_step=False)
        self.log("most", self.most, on_epoch=True, on_step=False)
        self.seen(value)
        if batch_idx == 0:
            self.log("first", value)
            self.log("seen", self.seen, on_epoch=True, on_step=False)
        return self.layer(batch).sum()

    def on_after_backward(self):
        self.log("hook", 0.1 + self.trainer.global_step, on_epoch=True, reduce_fx=max)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Keep(pl.Callback):
    """Leaves a checkpoint after a batch, as a stop does; and what the first epoch has logged."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, pl_module):
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def epochs(path: Path, *, batch: int = -1, start: Path | None = None):
    keep = Keep(path, batch)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EpochSums(), keep],
        default_root_dir=path.parent,
    )
    loader = DataLoader(torch.ones(len(VALUES), 1), batch_size=1)
    trainer.fit(Logging(), loader, ckpt_path=start, weights_only=False)
    return keep.logged


def test_numbers_and_metrics_of_an_epoch_are_those_of_all_its_batches(tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    expected = epochs(first, batch=1)
    assert expected[0]["total"] == expected[0]["total_again"] == pytest.approx(sum(VALUES))
    assert epochs(second, batch=3, start=first) == expected
    assert epochs(tmp_path / "third.ckpt", start=second) == expected


def test_at_an_epochs_end_nothing_is_kept_for_the_next(tmp_path: Path) -> None:
    class AtEnd(pl.callbacks.Checkpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                         enable_model_summary=False, callbacks=[EpochSums(), AtEnd()],
                         default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(Logging(), DataLoader(torch.ones(len(VALUES), 1), batch_size=1))
    assert torch.load(tmp_path / "end.ckpt", weights_only=False)["epoch_sums"] == [{}]
