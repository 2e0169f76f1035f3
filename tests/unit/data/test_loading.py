"""Loaders: workers, ranks, and Lightning at work."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.data import NpzBundle
from sparsepipe.data.dataloaders import default_workers
from sparsepipe.errors import DataError
from tests.support.data_helpers import STRONG, Shape, Unreadable, shapes_of


def test_batches_do_not_depend_on_workers_or_ranks(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(6, test_per_class=3)

    def epoch(num_workers: int, ranks: int, epoch: int) -> dict[int, Shape]:
        shapes: dict[int, Shape] = {}
        for rank in range(ranks):
            data = make_data(
                root, num_workers=num_workers, augment=STRONG, ratio_mode="uniform", point_ratio=0.9
            )
            ranks_of_trainer = {"num_replicas": ranks, "rank": rank}
            data.trainer = SimpleNamespace(distributed_sampler_kwargs=ranks_of_trainer)
            loader = data.train_dataloader()
            loader.sampler.set_epoch(epoch)
            part = shapes_of(loader)
            assert len(part) == 18 // ranks
            shapes |= part
        return shapes

    alone = epoch(num_workers=0, ranks=1, epoch=0)
    assert sorted(alone) == list(range(18))
    assert epoch(num_workers=2, ranks=1, epoch=0) == alone
    assert epoch(num_workers=0, ranks=3, epoch=0) == alone
    later = epoch(num_workers=0, ranks=1, epoch=1)
    assert all(later[index][0] != alone[index][0] for index in alone)


def test_workers_persist_and_see_each_epoch(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(3)
    loader = make_data(root, num_workers=1, augment=STRONG).train_dataloader()
    alone = make_data(root, augment=STRONG).train_dataloader()
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        alone.sampler.set_epoch(epoch)
        assert shapes_of(loader) == shapes_of(alone)


def test_data_sets_travel_to_workers_without_their_points(
    bundle: Path, make_data: Callable[..., Any]
) -> None:
    dataset = make_data(bundle, source=NpzBundle, num_points=None).train_dataloader().dataset
    dataset[0, 0]
    stored_bytes = dataset.points.points.array.nbytes
    pickled = pickle.dumps(dataset)
    assert len(pickled) < stored_bytes
    again = pickle.loads(pickled)[0, 3]
    np.testing.assert_array_equal(again["coords"], dataset[0, 3]["coords"])


def test_an_error_in_a_worker_is_that_of_its_data(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    loader = make_data(make_tree(3), num_workers=1).train_dataloader()
    loader.dataset.__class__ = Unreadable
    with pytest.raises(DataError, match=r"^the disk is gone\n  remedy: bring it back$"):
        list(loader)


def test_default_workers_leave_the_cores_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, expected in ((2, 1, 0), (16, 1, 4), (16, 4, 1), (128, 1, 8)):
        monkeypatch.setattr("sparsepipe.data.dataloaders.usable_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_workers() == expected


class Recorder(pl.LightningModule):
    """Notes which shapes Lightning hands it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 3)
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "test": [], "predict": []}
        self.epochs: list[int] = []

    def _loss(self, batch: dict[str, Any], stage: str) -> torch.Tensor:
        self.seen[stage].extend(batch["index"].tolist())
        return self.layer(batch["input"].feats).mean()

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        self.epochs.append(getattr(self.trainer.train_dataloader.sampler, "epoch", 0))
        return self._loss(batch, "train")

    def validation_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "val")

    def test_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "test")

    def predict_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_lightning_fits_tests_and_predicts(
    make_tree: Callable[..., Path], make_data: Callable[..., Any], tmp_path: Path, num_workers: int
) -> None:
    data = make_data(make_tree(5, test_per_class=2), val_share=0.2, num_workers=num_workers)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    module = Recorder()
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    assert sorted(module.seen["train"] + module.seen["val"]) == sorted([*range(15)] * 2)
    assert set(module.epochs) == {0, 1}
    assert module.seen["test"] == module.seen["predict"] == list(range(6))


IMPORTED_ONCE = """
import sys
from sparsepipe.data.dataloaders import import_once_for_workers, make_loader

class Modules:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return {"there": "trimesh" in sys.modules}

if __name__ == "__main__":  # so that workers have no reason of their own to import it
    import trimesh
    if "once" in sys.argv:
        import_once_for_workers()
    loader = make_loader(Modules(), sampler=[0, 1], batch_size=2, num_workers=1, collate=list)
    print([item["there"] for batch in loader for item in batch])
"""


@pytest.mark.parametrize("once", [True, pytest.param(False, marks=pytest.mark.full)])
def test_workers_have_what_their_server_has_imported(tmp_path: Path, once: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTED_ONCE)
    command = [sys.executable, str(script), *(["once"] if once else [])]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    assert ran.stdout.strip() == str([once, once])
