"""The DataModule: batches, splits, refused settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from sparsepipe.data import Augment, GeneratedShapes, NpzBundle
from sparsepipe.data.dataset import MAX_RESOLUTION
from sparsepipe.data.formats.off import write_off
from sparsepipe.errors import ConfigError
from sparsepipe.sparse import SparseTensor
from tests.support.data_helpers import STRONG, shapes_of


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
    assert data.samples("train").labels_S[batch["index"]].tolist() == batch["label"].tolist()


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


def test_disabled_augmentation_turns_nothing(
    make_tree: Callable[..., Path], make_data: Callable[..., Any]
) -> None:
    root, clouds = make_tree(2), []
    for augment in (Augment(), Augment(enabled=False, rotate_deg=180, flip=1.0)):
        dataset = make_data(root, augment=augment).train_dataloader().dataset
        clouds.append(dataset.unit_cloud(0, np.random.default_rng(0)))
    np.testing.assert_array_equal(*clouds)


@pytest.mark.parametrize("augment", [Augment(flip=1.0), Augment(rotate_deg=180)])
def test_turning_alone_keeps_every_point_of_a_box(
    make_tree: Callable[..., Path], make_data: Callable[..., Any], augment: Augment
) -> None:
    root, rng = make_tree(8), np.random.default_rng(0)
    for path in sorted((root / "box" / "train").iterdir()):
        box = trimesh.creation.box(rng.uniform(0.5, 2, 3))
        write_off(box.apply_translation(rng.uniform(-3, 3, 3)), path)
    data = make_data(root, augment=augment, num_points=None)
    dataset = data.train_dataloader().dataset
    for index in range(8, 16):  # the boxes
        assert len(dataset.unit_cloud(index, np.random.default_rng(index))) == 512


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resolution": MAX_RESOLUTION + 1}, f"less than or equal to {MAX_RESOLUTION}"),
        ({"point_ratio": 0.0}, "point_ratio=0.0 is not valid.* greater than 0"),
        ({"span": "box"}, "'extent', 'cube' or 'sphere'"),
        ({"num_points": 513}, "at most 512, or to null"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"representation": "dense", "resolution": 5000}, "data.representation=sparse"),
        ({"representation": "dense_surface", "augment": STRONG}, "data.augment.enabled=false"),
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


def test_what_the_source_cannot_give_is_refused_before_the_cache_is_built(
    make_tree: Callable[..., Path], bundle: Path, make_data: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        make_data(make_tree(1), num_points=513)
    with pytest.raises(ConfigError, match="needs a source that"):
        make_data(bundle, source=NpzBundle, num_points=None, representation="dense_surface")
    assert not (tmp_path / "cache").exists()
    # A bundle holds what it holds, however few points are taken from meshes.
    assert make_data(bundle, source=NpzBundle, cached_points=100, num_points=128).num_classes == 3


def test_generated_shapes_become_batches_of_every_class(
    make_data: Callable[..., Any], tmp_path: Path
) -> None:
    source = partial(GeneratedShapes, train_per_class=1, test_per_class=1)
    data = make_data(tmp_path / "shapes", source=source)
    assert data.num_classes >= 16
    assert len(shapes_of(data.test_dataloader())) == data.num_classes
    assert len(data.fingerprint()) == 32
