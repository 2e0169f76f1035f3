"""Batches against shapes that are drawn, augmented and voxelised one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from sparsepipe.data import Augment, NpzBundle
from sparsepipe.data.augment import CloudShift, CloudShiftKind
from sparsepipe.data.dataset import ShapeDataset
from sparsepipe.data.points import FloatArray, IntArray
from sparsepipe.data.voxels import grid_box


def cloud(data: ShapeDataset, index: int, rows: Any) -> FloatArray:
    points, origin_S3 = data.points, data.points.frames.origin_S3
    stored_N3 = points.points.array[points.rows_S[index]][rows]
    step_3, offset_3 = points.step_S3[index], points.offset_S3[index]
    if origin_S3 is not None and origin_S3[index].any():
        return np.asarray(stored_N3.astype("f8") * step_3 + offset_3 - origin_S3[index], "f4")
    return np.asarray(stored_N3.astype("f4") * step_3.astype("f4") + offset_3.astype("f4"))


def varied(unit_N3: FloatArray, augment: Augment, rng: np.random.Generator) -> FloatArray:
    if augment.dropout > 0:
        kept_N = rng.random(len(unit_N3)) >= rng.uniform(0, augment.dropout)
        unit_N3 = unit_N3[kept_N] if kept_N.any() else unit_N3[:1]
    if augment.scale != (1.0, 1.0):
        low, high = augment.scale
        factors = rng.uniform(low, high, 3 if augment.scale_per_axis else 1)
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


def sites_of(data: ShapeDataset, epoch: int, index: int) -> IntArray:
    settings, augment, frames = data.voxelisation, data.augment, data.points.frames
    rng = np.random.default_rng([settings.seed, data.stream, epoch, index])
    share, stored, rows = settings.point_ratio, data.points.points_per_shape, slice(None)
    if settings.ratio_mode == "uniform":
        share *= 1.0 - rng.random()
    if (kept := max(1, round(share * (settings.num_points or stored)))) < stored:
        rows = rng.choice(stored, kept, replace=False, shuffle=False)
    cloud_N3, all_P3 = cloud(data, index, rows), cloud(data, index, slice(None))
    low_3, high_3 = frames.low_S3[index], frames.high_S3[index]
    center_3, radius = frames.center_S3[index], frames.radius_S[index]
    if settings.shift is not None:
        cloud_N3 = settings.shift(cloud_N3, up_axis=settings.up_axis, key=(data.stream, index))
        low_3, high_3 = cloud_N3.min(axis=0), cloud_N3.max(axis=0)
        all_P3, center_3 = cloud_N3, (low_3 + high_3) / 2
        radius = np.linalg.norm(cloud_N3 - center_3, axis=1).max()
    if augment is not None and (augment.rotate_deg > 0 or augment.flip > 0):
        pose_33 = augment.pose(rng, up_axis=settings.up_axis)
        cloud_N3, center_3, all_P3 = cloud_N3 @ pose_33, center_3 @ pose_33, all_P3 @ pose_33
        low_3, high_3 = all_P3.min(axis=0), all_P3.max(axis=0)
    middle_3, half_3 = grid_box(low_3, high_3, center_3, radius, span=settings.span)
    unit_N3 = (cloud_N3 - middle_3) / half_3
    unit_N3 = np.clip(unit_N3 if augment is None else varied(unit_N3, augment, rng), -1, 1)
    exact_N3 = unit_N3 if settings.resolution <= 1024 else unit_N3.astype(np.float64)
    places_N3 = np.floor((exact_N3 + 1) * (settings.resolution / 2))
    return np.unique(np.minimum(places_N3, settings.resolution - 1).astype(np.int64), axis=0)


@pytest.mark.parametrize("number", range(24))
def test_a_batch_holds_what_each_shape_has_alone(
    number: int, make_tree: Callable[..., Path], bundle: Path, make_data: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rng = np.random.default_rng(number)

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    monkeypatch.setattr("sparsepipe.data.dataset._CHUNK_POINTS", one(300, 10_000))
    augment = Augment(
        scale=one((1, 1), (0.75, 1), (0.5, 1.6)), scale_per_axis=one(True, False),
        shift=one(0, 0.1, 0.9), jitter=one(0, 0.02), rotate_deg=one(0, 180), flip=one(0, 0.5),
        dropout=one(0, 0.4, 0.99), outside=one("drop", "clamp"),
    )  # fmt: skip
    sparse = one(True, True, False)
    settings = {
        "resolution": one(1, 7, 16, 64, *((65, 1290, 1291, 2**21) if sparse else ())),
        "representation": "sparse" if sparse else "dense", "augment": one(None, augment, augment),
        "shift": one(None, CloudShift(kind=one(*get_args(CloudShiftKind)), seed=2)),
        "span": one("extent", "cube", "sphere"), "num_points": one(None, 100, 17),
        "point_ratio": one(1.0, 0.5, 0.01), "ratio_mode": one("fixed", "uniform"),
        "up_axis": one("x", "y", "z"), "batch_size": one(1, 5, 8), "seed": number, "val_share": 0.3,
    }  # fmt: skip
    root = make_tree(3)
    if number % 2:  # some shapes of the bundle lie far from the origin
        root, arrays = bundle, dict(np.load(bundle / "train.npz"))
        arrays["offset"] = np.where(np.arange(12) % 3 == 0, 900.0, 0.0)[:, None] * np.ones(3)
        np.savez(bundle / "train.npz", **arrays)
        settings["source"] = NpzBundle
    module = make_data(root, **settings)
    for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
        loader.sampler.set_epoch(number)
        data = loader.dataset
        for some, batch in zip(loader.batch_sampler, loader, strict=True):
            indices = [int(data.indices_N[position]) for _, position in some]
            expected_M4 = np.concatenate([
                np.insert(sites_of(data, epoch, index), 0, b, axis=1)
                for b, (index, (epoch, _)) in enumerate(zip(indices, some, strict=True))
            ])  # fmt: skip
            for each in (batch, loader.collate_fn([data[access] for access in some])):
                assert each["index"].tolist() == indices
                assert each["label"].tolist() == data.points.labels_S[indices].tolist()
                x = each["input"]
                found = x.coords if sparse else x[:, 0].nonzero()
                np.testing.assert_array_equal(found.numpy(), expected_M4)
                assert (x.feats == 1).all() if sparse else x.sum() == len(found)


def test_a_subclass_has_samples_of_its_own(make_tree: Callable[..., Path], make_data: Any) -> None:
    class Relabelled(ShapeDataset):
        def __getitem__(self, access: Any) -> dict[str, Any]:
            return {**super().__getitem__(access), "label": 77}

    loader = make_data(make_tree(3), batch_size=2).train_dataloader()
    loader.dataset.__class__ = Relabelled
    assert next(iter(loader))["label"].tolist() == [77, 77]
