"""Data set of shapes, which draws, augments and voxelises the points of one shape at a time.

Shapes: P points stored, N points kept, M occupied voxels, R voxels per side, B shapes in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import Dataset

from sparsepipe.data.augment import Augment, Axis, CloudShift
from sparsepipe.data.dataloaders import Access, stacked
from sparsepipe.data.points import FloatArray, IntArray, PointSet, StoredArray
from sparsepipe.data.voxels import Span, grid_box, occupancy, voxelise
from sparsepipe.sparse import sparse_collate
from sparsepipe.sparse.coordinates import MAX_COORDINATE
from sparsepipe.utils.arguments import Count, checked

RatioMode = Literal["fixed", "uniform"]
Representation = Literal["sparse", "dense", "dense_surface"]


MAX_RESOLUTION = MAX_COORDINATE + 1
"""Largest number of voxels along an axis that sparse coordinates can represent."""
Resolution = Annotated[int, Field(ge=1, le=MAX_RESOLUTION)]
PointRatio = Annotated[float, Field(gt=0, le=1)]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Voxelisation:
    """Settings for turning stored points into a network's input; see ``ShapeDataModule``."""

    resolution: Resolution
    span: Span
    representation: Representation
    num_points: Count | None
    point_ratio: PointRatio
    ratio_mode: RatioMode
    up_axis: Axis
    seed: int
    shift: CloudShift | None = None


class ShapeDataset(Dataset[dict[str, Any]]):
    """Data set of the shapes ``indices_N`` of ``points``, read by (epoch, position in indices_N).

    ``augment`` is None for evaluation; ``stream`` gives training, validation and test different
    random draws; ``surface[rows_S[i]]``, if given, holds shape i's packed bits (dense_surface).
    """

    def __init__(
        self,
        points: PointSet,
        indices_N: IntArray,
        *,
        voxelisation: Voxelisation,
        augment: Augment | None = None,
        stream: int = 0,
        surface: StoredArray | None = None,
    ) -> None:
        self.points = points
        self.indices_N = indices_N
        self.voxelisation = voxelisation
        self.augment = augment if augment is not None and augment.enabled else None
        self.stream = stream
        self.surface = surface

    def __len__(self) -> int:
        return len(self.indices_N)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """Returns label, index and sparse ``coords`` int32 [M, 3] or dense ``input`` [1, R, R, R].

        ``index`` is the shape's index in ``points``. A plain position, as from the sampler of
        Lightning's ``overfit_batches``, is an access in epoch 0.
        """
        epoch, position = access if isinstance(access, tuple) else (0, access)
        index = int(self.indices_N[position])
        return self.sample(index, key=(self.stream, epoch, index))

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Any]:
        """Returns a shape as ``__getitem__`` does; random draws depend on the seed and ``key``.

        ``key``: the stream, the epoch, and a number for the shape, such as ``index``.
        """
        sample: dict[str, Any] = {"label": int(self.points.labels_S[index]), "index": index}
        settings = self.voxelisation
        side = settings.resolution
        if self.surface is not None:
            packed = self.surface.array[self.points.rows_S[index]]
            bits = np.unpackbits(packed, count=side**3).reshape(1, side, side, side)
            sample["input"] = bits.astype(np.float32)
            return sample
        rng = np.random.default_rng([settings.seed, *key])
        unit_N3 = self.unit_cloud(index, rng, shift_key=(key[0], key[2]))
        coords_M3 = voxelise(unit_N3, resolution=side)
        if settings.representation == "sparse":
            sample["coords"] = coords_M3
        else:
            sample["input"] = occupancy(coords_M3, resolution=side)
        return sample

    def unit_cloud(
        self, index: int, rng: np.random.Generator, *, shift_key: tuple[int, int] | None = None
    ) -> FloatArray:
        """Returns a shape's drawn and augmented points [N, 3], scaled to a grid of [-1, 1]^3.

        ``shift_key``, besides the shift's seed, seeds the shift; None: (``stream``, ``index``).
        """
        settings, points, augment = self.voxelisation, self.points, self.augment
        stored, share = points.points_per_shape, settings.point_ratio
        if settings.ratio_mode == "uniform":
            share *= 1.0 - rng.random()  # random() is in [0, 1), so the share is in (0, p]
        # Drawing num_points and keeping a random share equals drawing that share directly.
        kept = max(1, round(share * (settings.num_points or stored)))
        picked_N = None
        if kept < stored:
            picked_N = rng.choice(stored, kept, replace=False, shuffle=False)
        cloud_N3 = points.cloud(index, picked_N)
        frames = points.frames
        low_3, high_3 = frames.low_S3[index], frames.high_S3[index]
        center_3, radius = frames.center_S3[index], float(frames.radius_S[index])
        if settings.shift is not None:
            cloud_N3 = settings.shift(
                cloud_N3, up_axis=settings.up_axis, key=shift_key or (self.stream, index)
            )
            # The box of a scan is that of its points: nothing else of the shape is visible.
            low_3, high_3 = cloud_N3.min(axis=0), cloud_N3.max(axis=0)
            center_3 = (low_3 + high_3) / 2
            radius = float(np.linalg.norm(cloud_N3 - center_3, axis=1).max())
        if augment is not None and (augment.rotate_deg > 0 or augment.flip > 0):
            pose_33, before_N3 = augment.pose(rng, up_axis=settings.up_axis), cloud_N3
            cloud_N3, center_3 = cloud_N3 @ pose_33, center_3 @ pose_33
            if settings.span != "sphere":  # a sphere stays the same about the rotated centre
                # Measured on all stored points, so that the grid spans the shape's extent and
                # not that of the few points kept.
                all_P3 = points.cloud(index) if settings.shift is None else before_N3
                rotated_P3 = all_P3 @ pose_33
                low_3, high_3 = rotated_P3.min(axis=0), rotated_P3.max(axis=0)
        middle_3, half_3 = grid_box(low_3, high_3, center_3, radius, span=settings.span)
        unit_N3 = (cloud_N3 - middle_3) / half_3
        return unit_N3 if augment is None else augment.vary(unit_N3, rng)


@dataclass(frozen=True, slots=True)
class CollateShapes:
    """Combines samples of shapes into a batch.

    Attributes:
        resolution: R, the number of voxels of a sparse batch along each axis.
    """

    resolution: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns ``input`` (SparseTensor or [B, 1, R, R, R]), ``label`` [B] and ``index`` [B]."""
        if "input" in samples[0]:
            return stacked(samples)
        coords = [torch.from_numpy(sample["coords"]) for sample in samples]
        batch = stacked([{name: sample[name] for name in ("label", "index")} for sample in samples])
        batch["input"] = sparse_collate(
            [(each, torch.ones(len(each), 1)) for each in coords],
            spatial_shape=(self.resolution,) * 3,
        )
        return batch
