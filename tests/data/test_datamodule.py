"""The DataModule: batches, determinism, validation of settings, Lightning at work."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.data import Augment, GeneratedShapes, NpzBundle, OffTree, ShapeDataModule
from sparsepipe.data.checks import MAX_RESOLUTION
from sparsepipe.data.dataset import ShapeDataset
from sparsepipe.data.loading import default_workers
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.sparse import SparseTensor

STRONG = Augment(
    scale=(0.7, 1.1), shift=0.1, jitter=0.02, rotate_deg=180, flip=0.5, dropout=0.3, outside="drop"
)


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., ShapeDataModule]:
    def make(root: Path, **settings: Any) -> ShapeDataModule:
        defaults: dict[str, Any] = {
            "source": OffTree,
            "cache_dir": tmp_path / "cache",
            "resolution": 16,
            "cached_points": 512,
            "num_points": 200,
            "batch_size": 4,
            "num_workers": 0,
            "cache_workers": 1,
        }
        data = ShapeDataModule(root, **{**defaults, **settings})
        data.prepare_data()
        data.setup()
        return data

    return make


class Fatal(ShapeDataset):
    """Ends its process as the kernel does when memory runs out."""

    def __getitem__(self, access: tuple[int, int]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(access)


class Unreadable(ShapeDataset):
    """Fails as a lost disk would."""

    def __getitem__(self, access: tuple[int, int]) -> dict[str, Any]:
        raise DataError("the disk is gone", remedy="bring it back")


Shape = tuple[bytes, int]


def shapes_of(batches: Iterator[dict[str, Any]] | Any) -> dict[int, Shape]:
    """Voxels and label of each shape, by index."""
    shapes: dict[int, Shape] = {}
    for batch in batches:
        coords_N4 = batch["input"].coords
        for place, (index, label) in enumerate(
            zip(batch["index"].tolist(), batch["label"].tolist(), strict=True)
        ):
            own_M3 = coords_N4[coords_N4[:, 0] == place][:, 1:]
            assert len(own_M3)
            shapes[index] = (own_M3.numpy().tobytes(), label)
    return shapes


def test_a_sparse_batch(make_tree: Callable[..., Path], make_data: Callable[..., Any]) -> None:
    data = make_data(make_tree(3))
    batch = next(iter(data.train_dataloader()))
    inputs = batch["input"]
    assert isinstance(inputs, SparseTensor)
    assert inputs.spatial_shape == (16, 16, 16)
    assert inputs.coords.dtype == torch.int32
    assert inputs.feats.shape == (len(inputs.coords), 1)
    assert (inputs.feats == 1).all()
    assert set(inputs.coords[:, 0].tolist()) == {0, 1, 2, 3}
    assert batch["label"].dtype == batch["index"].dtype == torch.int64
    assert data.classes == ("ball", "box", "rod")
    assert data.num_classes == 3
    assert data.point_set("train").labels_S[batch["index"]].tolist() == batch["label"].tolist()


def test_dense_occupancy_holds_the_sparse_voxels(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(3)
    sparse, dense = make_data(root), make_data(root, representation="dense")
    for one, other in zip(sparse.train_dataloader(), dense.train_dataloader(), strict=True):
        assert other["input"].shape == (len(one["label"]), 1, 16, 16, 16)
        torch.testing.assert_close(one["input"].dense(), other["input"], rtol=0, atol=0)
        assert torch.equal(one["index"], other["index"])


def test_dense_surface_holds_nearly_all_sparse_voxels(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(3)
    (root / "ball" / "test" / "ball_0001.off").write_text("OFF\n")  # rows are not shapes
    sparse, dense = make_data(root), make_data(root, representation="dense_surface")
    for one, other in zip(sparse.test_dataloader(), dense.test_dataloader(), strict=True):
        assert torch.equal(one["index"], other["index"])
        occupied = one["input"].dense() > 0
        assert set(other["input"].unique().tolist()) == {0.0, 1.0}
        assert (other["input"][occupied] == 1).float().mean() > 0.98


def test_dense_surface_needs_meshes(bundle: Path, make_data: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="needs meshes"):
        make_data(bundle, source=NpzBundle, num_points=None, representation="dense_surface")


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
            data._ranks = partial(dict, num_replicas=ranks, rank=rank)
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


def test_evaluation_is_the_same_each_time_and_not_augmented(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(3)
    data = make_data(root, augment=STRONG)
    loader = data.test_dataloader()
    first = shapes_of(loader)
    loader.sampler.set_epoch(5)
    assert shapes_of(loader) == first
    assert shapes_of(make_data(root).test_dataloader()) == first
    assert shapes_of(make_data(root, seed=1).test_dataloader()) != first


def test_other_seeds_share_the_cache(
    make_tree: Callable[..., Path], make_data: Callable[..., Any], tmp_path: Path
) -> None:
    root = make_tree(2)
    for seed in (0, 1):
        make_data(root, seed=seed)
    assert len(list((tmp_path / "cache" / "points").iterdir())) == 2  # train and test
    make_data(root, sampling_seed=1)
    assert len(list((tmp_path / "cache" / "points").iterdir())) == 4


@pytest.mark.parametrize("mode", ["fixed", "uniform"])
def test_the_share_of_points_acts_in_training_and_testing(
    make_tree: Callable[..., Path], make_data: Callable[..., Any], mode: str
) -> None:
    root = make_tree(4)
    settings = {"resolution": MAX_RESOLUTION, "span": "cube"}  # a voxel for every point
    full = make_data(root, **settings)
    part = make_data(root, point_ratio=0.25, ratio_mode=mode, **settings)
    for stage in ("train_dataloader", "test_dataloader"):
        counts = [len(voxels) // 12 for voxels, _ in shapes_of(getattr(full, stage)()).values()]
        assert min(counts) > 190  # points of one quantised coordinate may meet
        counts = [len(voxels) // 12 for voxels, _ in shapes_of(getattr(part, stage)()).values()]
        assert max(counts) <= 50
        if mode == "fixed":
            assert min(counts) > 45
        else:
            assert min(counts) < 40


def test_the_grid_spans_turned_shapes_too(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    data = make_data(make_tree(2), augment=Augment(rotate_deg=180), num_points=None)
    dataset = data.train_dataloader().dataset
    for index in range(len(dataset)):
        unit_N3 = dataset.unit_cloud(index, np.random.default_rng(index))
        np.testing.assert_allclose(unit_N3.max(axis=0), 1, atol=1e-5)
        np.testing.assert_allclose(unit_N3.min(axis=0), -1, atol=1e-5)


def test_validation_is_apart_from_training_and_test(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root = make_tree(10, test_per_class=2)
    data = make_data(root, val_share=0.2, augment=STRONG)
    training, validation = shapes_of(data.train_dataloader()), shapes_of(data.val_dataloader())
    assert not set(training) & set(validation)
    assert sorted([*training, *validation]) == list(range(30))
    labels = [label for _, label in validation.values()]
    assert np.bincount(labels).tolist() == [2, 2, 2]
    plain = make_data(root, val_share=0.2)
    assert shapes_of(plain.val_dataloader()) == validation
    assert make_data(root).val_dataloader() == []


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
        self.epochs.append(self.trainer.train_dataloader.sampler.epoch)
        return self._loss(batch, "train")

    def validation_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "val")

    def test_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "test")

    def predict_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self._loss(batch, "predict")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_workers", [0, 1])
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


def test_a_worker_that_dies_is_explained(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    loader = make_data(make_tree(3), num_workers=1).train_dataloader()
    loader.dataset.__class__ = Fatal
    with pytest.raises(DataError, match="a loader worker was ended") as caught:
        list(loader)
    assert "data.num_workers" in caught.value.remedy


def test_an_error_in_a_worker_is_told_whole(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    loader = make_data(make_tree(3), num_workers=1).train_dataloader()
    loader.dataset.__class__ = Unreadable
    with pytest.raises(RuntimeError, match=r"(?s)the disk is gone.*remedy: bring it back"):
        list(loader)


def test_default_workers_leave_the_cores_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, expected in ((2, 1, 0), (16, 1, 4), (16, 4, 1), (128, 1, 8)):
        monkeypatch.setattr("sparsepipe.data.loading.usable_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_workers() == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resolution": 0}, f"from 1 to {MAX_RESOLUTION}"),
        ({"resolution": MAX_RESOLUTION + 1}, f"from 1 to {MAX_RESOLUTION}"),
        ({"point_ratio": 0.0}, r"in \(0, 1\]"),
        ({"point_ratio": 1.5}, r"in \(0, 1\]"),
        ({"ratio_mode": "both"}, "fixed, uniform"),
        ({"span": "box"}, "extent, cube, sphere"),
        ({"representation": "octree"}, "sparse, dense, dense_surface"),
        ({"up_axis": "up"}, "x, y, z"),
        ({"num_points": 513}, "at most 512, or to null"),
        ({"num_points": 0}, "1 or more"),
        ({"cached_points": 0}, "1 or more"),
        ({"batch_size": 0}, "1 or more"),
        ({"num_workers": -1}, "0 or more"),
        ({"val_share": 1.0}, "below 1"),
        ({"representation": "dense", "resolution": 5000}, "data.representation=sparse"),
        ({"representation": "dense_surface", "augment": STRONG}, "data.augment.enabled=false"),
        ({"representation": "dense_surface", "point_ratio": 0.5}, "data.point_ratio=1"),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(
    make_tree: Callable[..., Path],
    make_data: Callable[..., Any],
    settings: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_data(make_tree(1), **settings)


def test_generated_shapes_train_end_to_end(make_data: Callable[..., Any], tmp_path: Path) -> None:
    source = partial(GeneratedShapes, train_per_class=1, test_per_class=1)
    data = make_data(tmp_path / "shapes", source=source)
    assert data.num_classes >= 16
    assert len(shapes_of(data.test_dataloader())) == data.num_classes
    assert len(data.fingerprint()) == 32
