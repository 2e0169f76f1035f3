"""Batches against shapes that are drawn, augmented and voxelised one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from sparsepipe.data import Augment, NpzBundle
from sparsepipe.data.augment import CloudShift
from sparsepipe.data.dataset import ShapeDataset
from sparsepipe.data.points import FloatArray, IntArray
from sparsepipe.data.voxels import grid_box
from sparsepipe.sparse import SparseTensor

SHIFTS = ("none", "partial", "noisy", "occluded", "density", "rotated")


def cloud(data: ShapeDataset, index: int, rows: Any) -> FloatArray:
    points, frames = data.points, data.points.frames
    stored_N3 = points.points.array[points.rows_S[index]][rows]
    step_3, offset_3 = points.step_S3[index], points.offset_S3[index]
    if frames.origin_S3 is not None and frames.origin_S3[index].any():
        exact_N3 = stored_N3.astype("f8") * step_3 + offset_3 - frames.origin_S3[index]
        return np.asarray(exact_N3, np.float32)
    return np.asarray(stored_N3.astype("f4") * step_3.astype("f4") + offset_3.astype("f4"))


def varied(unit_N3: FloatArray, augment: Augment, rng: np.random.Generator) -> FloatArray:
    if augment.dropout > 0:
        kept_N = rng.random(len(unit_N3)) >= rng.uniform(0, augment.dropout)
        unit_N3 = unit_N3[kept_N] if kept_N.any() else unit_N3[:1]
    if augment.scale != (1.0, 1.0):
        factors = rng.uniform(*augment.scale, 3 if augment.scale_per_axis else 1)
        unit_N3 = unit_N3 * factors.astype(np.float32)
    if augment.shift > 0:
        unit_N3 = unit_N3 + rng.uniform(-augment.shift, augment.shift, 3).astype(np.float32)
    if augment.outside == "drop":
        inside_N = (np.abs(unit_N3) <= 1 + np.float32(1e-4)).all(axis=1)
        unit_N3 = unit_N3[inside_N] if inside_N.any() else unit_N3
    if augment.jitter > 0:
        noise_N3 = rng.standard_normal(unit_N3.shape, np.float32) * np.float32(augment.jitter)
        unit_N3 = unit_N3 + np.clip(noise_N3, -augment.jitter_clip, augment.jitter_clip)
    return unit_N3


def sites(data: ShapeDataset, epoch: int, index: int) -> IntArray:
    """Sites [M, 3] of one shape."""
    settings, augment, frames = data.voxelisation, data.augment, data.points.frames
    rng = np.random.default_rng([settings.seed, data.stream, epoch, index])
    share, stored = settings.point_ratio, data.points.points_per_shape
    if settings.ratio_mode == "uniform":
        share *= 1.0 - rng.random()
    kept, rows = max(1, round(share * (settings.num_points or stored))), slice(None)
    if kept < stored:
        rows = rng.choice(stored, kept, replace=False, shuffle=False)
    before_N3 = cloud_N3 = cloud(data, index, rows)
    low_3, high_3 = frames.low_S3[index], frames.high_S3[index]
    center_3, radius = frames.center_S3[index], frames.radius_S[index]
    if settings.shift is not None:
        before_N3 = cloud_N3 = settings.shift(
            cloud_N3, up_axis=settings.up_axis, key=(data.stream, index)
        )
        low_3, high_3 = cloud_N3.min(axis=0), cloud_N3.max(axis=0)
        center_3 = (low_3 + high_3) / 2
        radius = np.linalg.norm(cloud_N3 - center_3, axis=1).max()
    if augment is not None and (augment.rotate_deg > 0 or augment.flip > 0):
        pose_33 = augment.pose(rng, up_axis=settings.up_axis)
        cloud_N3, center_3 = cloud_N3 @ pose_33, center_3 @ pose_33
        all_N3 = before_N3 if settings.shift is not None else cloud(data, index, slice(None))
        low_3, high_3 = (all_N3 @ pose_33).min(axis=0), (all_N3 @ pose_33).max(axis=0)
    middle_3, half_3 = grid_box(low_3, high_3, center_3, radius, span=settings.span)
    unit_N3 = (cloud_N3 - middle_3) / half_3
    unit_N3 = np.clip(unit_N3 if augment is None else varied(unit_N3, augment, rng), -1, 1)
    side = settings.resolution
    exact_N3 = unit_N3 if side <= 1024 else unit_N3.astype(np.float64)
    places_N3 = np.clip((exact_N3 + 1) * (side / 2), 0, side - 1).astype(np.int64)
    return np.unique(places_N3, axis=0)


def drawn_settings(rng: np.random.Generator) -> dict[str, Any]:
    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    augment = Augment(
        scale=one((1, 1), (0.75, 1), (0.5, 1.6)), scale_per_axis=one(True, False),
        shift=one(0, 0.1, 0.9), jitter=one(0, 0.02), rotate_deg=one(0, 180), flip=one(0, 0.5),
        dropout=one(0, 0.4, 0.99), outside=one("drop", "clamp"),
    )  # fmt: skip
    return {
        "augment": one(None, augment, augment), "representation": one("sparse", "sparse", "dense"),
        "shift": one(None, CloudShift(kind=one(*SHIFTS), seed=2)), "up_axis": one("x", "y", "z"),
        "span": one("extent", "cube", "sphere"), "num_points": one(None, 100, 17),
        "point_ratio": one(1.0, 0.5, 0.01), "ratio_mode": one("fixed", "uniform"),
        "batch_size": one(1, 5, 8), "seed": int(rng.integers(9)), "val_share": 0.3,
    }  # fmt: skip


@pytest.mark.parametrize("number", range(24))
def test_a_batch_holds_what_each_shape_has_alone(
    number: int, make_tree: Callable[..., Path], bundle: Path, make_data: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("sparsepipe.data.dataset._CHUNK_POINTS", 300)  # threads share a batch
    rng = np.random.default_rng(number)
    settings = drawn_settings(rng)
    root, source = make_tree(3), {}
    if number % 2:  # some shapes of the bundle lie far from the origin
        arrays = dict(np.load(bundle / "train.npz"))
        arrays["offset"] = np.where(np.arange(12) % 3 == 0, 900.0, 0.0)[:, None] * np.ones(3)
        np.savez(bundle / "train.npz", **arrays)
        root, source = bundle, {"source": NpzBundle}
    sparse = settings["representation"] == "sparse"
    side = int(rng.choice([1, 7, 16, 64, *((65, 1290, 1291, 2**21) if sparse else ())]))
    module = make_data(root, resolution=side, **settings, **source)
    for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
        loader.sampler.set_epoch(number)
        data = loader.dataset
        for some, batch in zip(loader.batch_sampler, loader, strict=True):
            indices = [int(data.indices_N[position]) for _, position in some]
            alone = loader.collate_fn([data[access] for access in some])
            expected_M4 = np.concatenate([
                np.insert(sites(data, epoch, index), 0, b, axis=1)
                for b, (index, (epoch, _)) in enumerate(zip(indices, some, strict=True))
            ])  # fmt: skip
            for each in (batch, alone):
                assert each["index"].tolist() == indices
                assert each["label"].tolist() == data.points.labels_S[indices].tolist()
                x = each["input"]
                assert isinstance(x, SparseTensor) == sparse
                found = x.coords if sparse else x[:, 0].nonzero()
                np.testing.assert_array_equal(found.numpy(), expected_M4)
                assert (x.feats == 1).all() if sparse else x.sum() == len(found)


def test_all_of_a_batch_is_pinned(
    make_tree: Callable[..., Path], make_data: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = list[torch.Tensor]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: pinned.append(x) or x)
    batch = pin_memory(next(iter(make_data(make_tree(2)).train_dataloader())))
    x = batch["input"]
    assert {*map(id, pinned)} == {*map(id, (x.feats, x.coords, batch["label"], batch["index"]))}
