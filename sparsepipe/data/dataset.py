"""Data set of shapes, which draws, augments and voxelises the points of a whole batch at once.

Shapes: P points stored, N points kept of a shape, T of all shapes, M occupied voxels, R voxels per
side, V voxels of a grid, B shapes in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch.utils.data import Dataset

from sparsepipe.data.augment import Augment, Axis, CloudShift
from sparsepipe.data.dataloaders import Access, stacked
from sparsepipe.data.points import Clouds, FloatArray, IntArray, PointSet, StoredArray
from sparsepipe.data.voxels import Span, grid_box, occupied_sites, voxel_numbers
from sparsepipe.sparse import SparseTensor, sparse_collate
from sparsepipe.sparse.coordinates import MAX_COORDINATE
from sparsepipe.utils.arguments import Count, checked

RatioMode = Literal["fixed", "uniform"]
Representation = Literal["sparse", "dense", "dense_surface"]


MAX_RESOLUTION = MAX_COORDINATE + 1
"""Largest number of voxels along an axis that sparse coordinates can represent."""
Resolution = Annotated[int, Field(ge=1, le=MAX_RESOLUTION)]
PointRatio = Annotated[float, Field(gt=0, le=1)]

Key = tuple[int, int, int]
"""The stream of a data set, the epoch, and a shape's number, such as its index."""
Draw = tuple[int, Generator, tuple[int, int]]
"""A shape's index, its random generator, and what seeds its shift, besides the shift's seed."""

_CHUNK_POINTS = 2**17
"""Points that are drawn, augmented and voxelised together: more do not stay in a CPU's caches."""


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

    def __getitems__(
        self, accesses: Sequence[Access | int]
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the batch that :class:`CollateShapes` makes of these samples, but much faster.

        A ``DataLoader``, which needs that collate function, calls this method instead of
        ``__getitem__``. A subclass with samples of its own returns these.
        """
        own = type(self)
        if (own.__getitem__, own.sample) != (ShapeDataset.__getitem__, ShapeDataset.sample):
            return [self[access] for access in accesses]
        pairs = [each if isinstance(each, tuple) else (0, each) for each in accesses]
        indices = [int(self.indices_N[position]) for _, position in pairs]
        keys = [(self.stream, pair[0], i) for pair, i in zip(pairs, indices, strict=True)]
        return self.batch(indices, keys=keys)

    def sample(self, index: int, *, key: Key) -> dict[str, Any]:
        """Returns a shape as ``__getitem__`` does; random draws depend on the seed and ``key``."""
        batch = self.batch([index], keys=[key])
        sample: dict[str, Any] = {name: int(batch[name]) for name in ("label", "index")}
        if isinstance(x := batch["input"], SparseTensor):
            return {**sample, "coords": x.coords[:, 1:].numpy()}
        return {**sample, "input": x[0].numpy()}

    def batch(self, indices: Sequence[int], *, keys: Sequence[Key]) -> dict[str, Any]:
        """Returns a batch of shapes; the random draws of each depend on the seed and its key."""
        settings, points = self.voxelisation, self.points
        side = settings.resolution
        shape = (len(indices), 1, side, side, side)
        batch: dict[str, Any] = {
            "label": torch.from_numpy(points.labels_S[indices].astype(np.int64)),
            "index": torch.tensor(indices),
        }
        if self.surface is not None:
            packed = self.surface.array[points.rows_S[indices]]
            bits = np.unpackbits(packed, axis=1, count=side**3).reshape(shape)
            return {**batch, "input": torch.from_numpy(bits.astype(np.float32))}

        size = max(1, _CHUNK_POINTS // (settings.num_points or points.points_per_shape))
        found = list[NDArray[np.int32]]()
        for start in range(0, len(indices), size):
            some = slice(start, start + size)
            draws = [
                (index, np.random.default_rng([settings.seed, *key]), (key[0], key[2]))
                for index, key in zip(indices[some], keys[some], strict=True)
            ]
            clouds = self.unit_clouds(draws)
            voxels_T = voxel_numbers(clouds.points_3T.T, resolution=side)
            found.append(occupied_sites(voxels_T, clouds.parts(), resolution=side))
            found[-1][:, 0] += start
        sites_M4 = np.concatenate(found)
        if settings.representation == "sparse":
            ones, sites = torch.ones(len(sites_M4), 1), torch.from_numpy(sites_M4)
            x = SparseTensor(ones, sites, spatial_shape=shape[2:], batch_size=len(indices))
            return {**batch, "input": x}
        grids = np.zeros(shape, np.float32)
        b, x, y, z = sites_M4.T
        grids[b, 0, x, y, z] = 1.0
        return {**batch, "input": torch.from_numpy(grids)}

    def unit_cloud(self, index: int, rng: Generator) -> FloatArray:
        """Returns a shape's drawn and augmented points [N, 3], scaled to a grid of [-1, 1]^3."""
        return self.unit_clouds([(index, rng, (self.stream, index))]).points_3T.T

    def unit_clouds(self, draws: Sequence[Draw]) -> Clouds:
        """Returns shapes' drawn and augmented points, each scaled to a grid of [-1, 1]^3."""
        settings, points, augment = self.voxelisation, self.points, self.augment
        stored, picked = points.points_per_shape, list[IntArray | None]()
        indices, rngs, _ = zip(*draws, strict=True)
        for rng in rngs:
            share = settings.point_ratio
            if settings.ratio_mode == "uniform":
                share *= 1.0 - rng.random()  # random() is in [0, 1), so the share is in (0, p]
            # Drawing num_points and keeping a random share equals drawing that share directly.
            kept = max(1, round(share * (settings.num_points or stored)))
            few = kept < stored
            picked.append(rng.choice(stored, kept, replace=False, shuffle=False) if few else None)
        clouds, frames = points.clouds(indices, picked), points.frames
        framed = (frames.low_S3, frames.high_S3, frames.center_S3, frames.radius_S)
        box = [values_S[list(indices)] for values_S in framed]
        turned = augment is not None and (augment.rotate_deg > 0 or augment.flip > 0)
        if turned or settings.shift is not None:
            clouds = self._move(clouds, box, draws)
        middle_B3, half_B3 = grid_box(*box, span=settings.span)
        clouds.apply(np.subtract, middle_B3)
        clouds.apply(np.divide, half_B3)
        if augment is not None:
            augment.vary_clouds(clouds, rngs)
        return clouds

    def _move(self, clouds: Clouds, box: Sequence[FloatArray], draws: Sequence[Draw]) -> Clouds:
        """Returns shifted and turned clouds, and changes the numbers of their ``box``."""
        settings, augment, moved = self.voxelisation, self.augment, list[FloatArray]()
        low_B3, high_B3, center_B3, radius_B = box
        for b, (part, (index, rng, key)) in enumerate(zip(clouds.parts(), draws, strict=True)):
            # Their order in memory decides how sums in products and norms are rounded.
            cloud_N3 = np.ascontiguousarray(clouds.points_3T[:, part].T)
            if settings.shift is not None:
                cloud_N3 = settings.shift(cloud_N3, up_axis=settings.up_axis, key=key)
                # The box of a scan is that of its points: nothing else of the shape is visible.
                low_B3[b], high_B3[b] = cloud_N3.min(axis=0), cloud_N3.max(axis=0)
                center_B3[b] = (low_B3[b] + high_B3[b]) / 2
                radius_B[b] = np.linalg.norm(cloud_N3 - center_B3[b], axis=1).max()
            if augment is not None and (augment.rotate_deg > 0 or augment.flip > 0):
                pose_33, all_P3 = augment.pose(rng, up_axis=settings.up_axis), cloud_N3
                if settings.span != "sphere":  # a sphere stays the same about the rotated centre
                    # Measured on all stored points, so that the grid spans the shape's extent and
                    # not that of the few points kept.
                    if settings.shift is None:
                        all_P3 = np.ascontiguousarray(self.points.cloud(index))
                    rotated_3P = np.ascontiguousarray((all_P3 @ pose_33).T)
                    low_B3[b], high_B3[b] = rotated_3P.min(axis=1), rotated_3P.max(axis=1)
                cloud_N3, center_B3[b] = cloud_N3 @ pose_33, center_B3[b] @ pose_33
            moved.append(cloud_N3)
        points_3T = np.ascontiguousarray(np.concatenate(moved).T)
        return Clouds(points_3T, [len(each) for each in moved])


@dataclass(frozen=True, slots=True)
class CollateShapes:
    """Combines samples of shapes into a batch.

    Attributes:
        resolution: R, the number of voxels of a sparse batch along each axis.
    """

    resolution: int

    def __call__(self, samples: Sequence[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
        """Returns ``input`` (SparseTensor or [B, 1, R, R, R]), ``label`` [B] and ``index`` [B].

        A batch, as from ``ShapeDataset.__getitems__``, is returned as it is.
        """
        if isinstance(samples, dict):
            return samples
        if "input" in samples[0]:
            return stacked(samples)
        coords = [torch.from_numpy(sample["coords"]) for sample in samples]
        batch = stacked([{name: sample[name] for name in ("label", "index")} for sample in samples])
        batch["input"] = sparse_collate(
            [(each, torch.ones(len(each), 1)) for each in coords],
            spatial_shape=(self.resolution,) * 3,
        )
        return batch
