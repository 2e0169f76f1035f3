"""Scenes: clouds of points with features and labels, and the voxels that networks take of them.

Shapes: P points, N occupied voxels, C channels, K classes, 3 axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from sparsepipe.data.augment import Axis
from sparsepipe.data.points import ExactArray, FloatArray, IntArray
from sparsepipe.errors import DataError
from sparsepipe.sparse import voxelize
from sparsepipe.sparse.coordinates import MAX_COORDINATE
from sparsepipe.utils.arguments import checked

IGNORED = -100
"""Label of points that do not count, as in PyTorch's cross-entropy."""
WIDTHS = {"color": 3, "normal": 3, "coord": 3}
"""Channels of the features that have more than one."""
DERIVED = ("constant", "coord", "height")
"""Features that follow from the points' positions."""
_FLOOR_SHARE = 0.01
"""Share of a scene's points below its floor: echoes of lasers may lie far beneath the ground."""


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A cloud of points with features and, perhaps, labels.

    Attributes:
        coords_P3: float32 [P, 3], positions in metres relative to ``origin_3``.
        features: float32 [P, C] by name: ``color`` [P, 3] in [0, 1], ``normal`` [P, 3],
            ``intensity`` [P, 1], ``return_number`` [P, 1]; any other [P, 1].
        labels_P: int64 [P], class numbers, -100 for points that do not count; None: unknown.
        origin_3: float64 [3], the position of the point (0, 0, 0) of ``coords_P3``.
    """

    coords_P3: FloatArray
    _: KW_ONLY
    features: Mapping[str, FloatArray] = field(default_factory=dict)
    labels_P: IntArray | None = None
    origin_3: ExactArray = field(default_factory=lambda: np.zeros(3))

    def __len__(self) -> int:
        return len(self.coords_P3)

    def take(self, rows: NDArray[Any]) -> Scene:
        """Returns the scene of some points: their numbers in any order, or a mask [P]."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows  # several times as fast
        return replace(
            self,
            coords_P3=self.coords_P3.take(rows, axis=0),
            features={name: values.take(rows, axis=0) for name, values in self.features.items()},
            labels_P=None if self.labels_P is None else self.labels_P[rows],
        )


def mirrored(scene: Scene, axes: Sequence[int]) -> Scene:
    """Returns a scene mirrored along some axes, with its normals."""
    signs_3 = np.ones(3, np.float32)
    signs_3[list(axes)] = -1
    features = {
        name: values * signs_3 if name == "normal" else values
        for name, values in scene.features.items()
    }
    return replace(scene, coords_P3=scene.coords_P3 * signs_3, features=features)


def bounds_of(values_PC: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the lowest and the highest value of each column, [C] and [C]."""
    values_CP = np.ascontiguousarray(values_PC.T)  # along rows, numpy is many times faster
    return values_CP.min(axis=1), values_CP.max(axis=1)


def channels_of(features: Iterable[str]) -> int:
    """Returns the number of channels of features: 3 of colours, normals and coords, 1 of others."""
    return sum(WIDTHS.get(name.lower(), 1) for name in features)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SceneVoxels:
    """Settings with which scenes become voxels.

    Args:
        voxel_size: side of a voxel in metres.
        features: names of the features of a voxel, in the order of its channels: those of the
            scene; ``constant``, which is 1; ``height`` in metres above the scene's floor, below
            which a hundredth of its points lie; ``coord``, positions in metres relative to the
            middle of the scene's box, upwards to its lower side.
        reduce: whether a voxel has the ``mean`` of its points' features or those of its ``first``.
        up_axis: vertical axis.
    """

    voxel_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    features: tuple[str, ...] = ("constant",)
    reduce: Literal["mean", "first"] = "mean"
    up_axis: Axis = "z"

    @property
    def in_channels(self) -> int:
        """C, the number of channels of a voxel's features."""
        return channels_of(self.features)

    def prepare(self, scene: Scene) -> Scene:
        """Returns a scene of which parts keep the features that follow from the whole scene.

        It must be called before a scene is cropped or cut into blocks.
        """
        if "height" not in self.features or "height" in scene.features:
            return scene
        return replace(scene, features={**scene.features, "height": self._feature("height", scene)})

    def voxelise(self, scene: Scene) -> tuple[NDArray[np.int32], FloatArray, IntArray]:
        """Returns the occupied voxels of a scene, their features, and the voxel of each point.

        Voxels are those of a grid through the scene's origin, each with its lower faces.

        Returns:
            ``coords_N3`` int32, from 0 on each axis, in lexicographic order; ``feats_NC`` float32;
            ``rows_P`` int64, the row of each point's voxel in these.

        Raises:
            DataError: the scene has no points or lacks a feature, or its grid is too large.
        """
        if not len(scene):
            raise DataError("a scene has no points", remedy="leave it out, or use larger crops")
        coords_3P = np.ascontiguousarray(scene.coords_P3.T, np.float64)
        places_3P = np.floor(coords_3P / self.voxel_size)
        places_3P -= places_3P.min(axis=1, keepdims=True)
        if not places_3P.max() < MAX_COORDINATE:  # also of infinite coordinates
            raise DataError(
                f"a scene has more than {MAX_COORDINATE} voxels of {self.voxel_size:g} m along an "
                "axis",
                remedy="set a larger data.voxel_size, check the unit of the coordinates, or remove "
                "points that lie far from all others",
            )
        feats_PC = np.concatenate([self._feature(name, scene) for name in self.features], axis=1)
        places_P3, given_PC = torch.from_numpy(places_3P.T.copy()), torch.from_numpy(feats_PC)
        x, rows_P = voxelize(places_P3, given_PC, voxel_size=1.0, reduce=self.reduce)
        return x.coords[:, 1:].numpy(), x.feats.numpy(), rows_P.numpy()

    def _feature(self, name: str, scene: Scene) -> FloatArray:
        if name in scene.features:
            return scene.features[name]
        up = "xyz".index(self.up_axis)
        if name == "constant":
            return np.ones((len(scene), 1), np.float32)
        if name == "height":
            floor = np.float32(np.quantile(scene.coords_P3[:, up], _FLOOR_SHARE))
            height_P1: FloatArray = scene.coords_P3[:, up, None] - floor
            return height_P1
        if name == "coord":
            low_3, high_3 = bounds_of(scene.coords_P3)
            middle_3 = (low_3 + high_3) / np.float32(2)
            middle_3[up] = low_3[up]
            moved_P3: FloatArray = scene.coords_P3 - middle_3
            return moved_P3
        known = ", ".join([*DERIVED, *sorted(scene.features)])
        raise DataError(
            f"a scene has no feature {name!r}; it has {known}",
            remedy="name features that all scenes have in data.features",
        )


def class_counts(
    rows_P: IntArray, labels_P: IntArray | None, *, num_voxels: int, num_classes: int
) -> FloatArray:
    """Counts the points of each class in each voxel, float32 [N, K]; 0 without labels.

    Args:
        rows_P: the voxel of each point.
        labels_P: class numbers; points with negative ones are not counted. None: no labels.
        num_voxels: N.
        num_classes: K.
    """
    if labels_P is None:
        return np.zeros((num_voxels, num_classes), np.float32)
    counted_P = labels_P >= 0
    places_P = rows_P[counted_P] * num_classes + labels_P[counted_P]
    counts = np.bincount(places_P, minlength=num_voxels * num_classes)
    return counts.reshape(num_voxels, num_classes).astype(np.float32)
