"""How many batches a training takes, by what Lightning does with the same settings."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from typing_extensions import override

from sparsepipe.tasks.profile import batches_of_training
from tests.support.command_line import composed

LOADED = 7


class Counting(pl.Callback):
    """Counts the batches that a training takes."""

    batches = 0

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "limit_train_batches": 5},
        {"max_epochs": 3, "limit_train_batches": 50},
        {"max_epochs": 3, "limit_train_batches": 0.5},
        {"max_epochs": 3, "limit_train_batches": 1.0},
        {"max_epochs": 3, "limit_train_batches": 1},
        {"max_epochs": 3, "overfit_batches": 2, "limit_train_batches": 5},
        {"max_epochs": 3, "max_steps": 10},
        {"max_epochs": 1, "max_steps": 10},
        {"max_epochs": -1, "max_steps": 10},
        {"max_epochs": None, "max_steps": 10},
        {"max_epochs": 9, "max_steps": 10, "accumulate_grad_batches": 3},
        {"max_epochs": 9, "max_steps": 5, "accumulate_grad_batches": 2, "limit_train_batches": 4},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_it_is_as_long_as_lightning_trains(settings: dict[str, Any]) -> None:
    counting = Counting()
    trainer = pl.Trainer(
        **settings,
        accelerator="cpu",
        callbacks=[counting],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, LOADED)))
    assert counting.batches > 0
    full = (
        composed("trainer=default")
        .replace({f"trainer.{key}": value for key, value in settings.items()})
        .trainer
    )
    assert batches_of_training(full, LOADED) == counting.batches


@pytest.mark.parametrize("epochs", [None, -1])
def test_without_an_end_there_is_no_length(epochs: int | None) -> None:
    trainer = composed("trainer=default").replace({"trainer.max_epochs": epochs}).trainer
    assert batches_of_training(trainer, LOADED) is None
