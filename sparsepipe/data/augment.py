"""Augmentation of training shapes, and shifts, which make the clouds of a domain look like scans.

Shapes: N points of a cloud, M points of the scan that a shift makes of it, 3 axes.

Rotation and mirroring act *before* the grid is placed around the shape, so that a rotated shape
still spans the grid. Scale, shift and jitter act *after* that, in the unit cube (grid half width
1), because a grid that spans each shape's own extent would undo them. Points that scale and shift
move out of the grid are dropped (as if the shape were cropped) or moved to its border. Jitter never
drops a point, because otherwise a face on the border would lose half of its points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from sparsepipe.data.points import Clouds, FloatArray
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Seed, checked

Axis = Literal["x", "y", "z"]

_Share = Annotated[float, Field(ge=0, le=1)]
_ROUNDING = np.float32(1e-4)
"""Distance outside the grid, in half widths, up to which a point still counts as inside."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Settings of the augmentation; the defaults change nothing.

    Args:
        enabled: whether the other settings have any effect.
        scale: smallest and largest factor of the random scale; [1, 1]: no scaling.
        scale_per_axis: whether each axis draws a separate factor.
        shift: largest shift along each axis, in grid half widths.
        jitter: standard deviation of the noise on each coordinate, in grid half widths.
        jitter_clip: largest noise on a coordinate, in grid half widths.
        rotate_deg: largest rotation about the vertical axis in either direction, in degrees.
        flip: probability of mirroring along each horizontal axis.
        dropout: largest share of points dropped at random; each access draws a share up to it.
        outside: ``drop`` removes points moved out of the grid, ``clamp`` puts them on its border.
    """

    enabled: bool = True
    scale: Sequence[float] = (1.0, 1.0)
    scale_per_axis: bool = True
    shift: _Share = 0.0
    jitter: _Share = 0.0
    jitter_clip: _Share = 0.05
    rotate_deg: Annotated[float, Field(ge=0, le=180)] = 0.0
    flip: _Share = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    outside: Literal["drop", "clamp"] = "drop"

    def __post_init__(self) -> None:
        factors = tuple(float(factor) for factor in self.scale)
        object.__setattr__(self, "scale", factors)
        if len(factors) != 2 or not 0 < factors[0] <= factors[1]:
            raise ConfigError(
                f"data.augment.scale={list(factors)} is not a range of positive factors",
                remedy="set it to two factors, 0 < smallest <= largest",
            )

    def pose(self, rng: np.random.Generator, *, up_axis: Axis) -> FloatArray:
        """Draws a matrix [3, 3] of rotation and mirroring, to be applied as ``points @ pose``."""
        pose_33 = np.eye(3, dtype=np.float32)
        up = "xyz".index(up_axis)
        first, second = (up + 1) % 3, (up + 2) % 3
        if self.rotate_deg > 0:
            angle = np.deg2rad(rng.uniform(-self.rotate_deg, self.rotate_deg))
            pose_33[first, first] = pose_33[second, second] = np.cos(angle)
            pose_33[first, second] = np.sin(angle)
            pose_33[second, first] = -np.sin(angle)
        if self.flip > 0:
            for axis in (first, second):
                if rng.random() < self.flip:
                    pose_33[:, axis] *= -1
        return pose_33

    def vary(self, unit_N3: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Drops, scales, shifts and jitters points; returns at least one, and all in [-1, 1]^3."""
        clouds = Clouds(np.array(unit_N3.T, order="C"), [len(unit_N3)])
        self.vary_clouds(clouds, [rng])
        return clouds.points_3T.T

    def vary_clouds(self, clouds: Clouds, rngs: Sequence[Generator]) -> None:
        """Varies clouds in place as ``vary`` does, each with its own random generator."""
        if not self.enabled:
            return
        if self.dropout > 0:
            kept = [
                rng.random(count) >= rng.uniform(0, self.dropout)
                for rng, count in zip(rngs, clouds.counts, strict=True)
            ]
            clouds.keep(np.concatenate(kept), least=slice(1))
        if tuple(self.scale) != (1.0, 1.0):
            (low, high), axes = self.scale, 3 if self.scale_per_axis else 1
            factors = [rng.uniform(low, high, axes) for rng in rngs]
            clouds.apply(np.multiply, np.stack(factors).astype(np.float32))
        if self.shift > 0:
            moves = [rng.uniform(-self.shift, self.shift, 3) for rng in rngs]
            clouds.apply(np.add, np.stack(moves).astype(np.float32))
        if self.outside == "drop":
            inside_3T = np.abs(clouds.points_3T) <= 1 + _ROUNDING
            clouds.keep(np.logical_and.reduce(inside_3T), least=slice(None))
        if self.jitter > 0:
            noise_T3 = np.empty(clouds.points_3T.shape[::-1], np.float32)
            for rng, part in zip(rngs, clouds.parts(), strict=True):
                rng.standard_normal(dtype=np.float32, out=noise_T3[part])
            noise_T3 *= np.float32(self.jitter)
            np.clip(noise_T3, -self.jitter_clip, self.jitter_clip, out=noise_T3)
            clouds.points_3T += noise_T3.T
        np.clip(clouds.points_3T, -1, 1, out=clouds.points_3T)


_CELLS = 24
"""Cells along each side of a viewer's image; ``partial`` keeps the nearest points in each cell."""
_LEAST = 16
"""Fewest points of a scan; a shift that would leave fewer is not applied."""


CloudShiftKind = Literal["none", "partial", "noisy", "occluded", "density", "rotated"]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CloudShift:
    """Turns clouds into scans, with the same random draws whenever a shape is read.

    The shift changes the points drawn from a cloud, before the grid is placed around them.

    Args:
        kind: a key of :data:`SHIFTS`; ``none`` leaves clouds as they are.
        strength: how strongly clouds change, from 0 (least) to 2 (most).
        seed: seed of the random draws.
    """

    kind: CloudShiftKind = "none"
    strength: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: Seed = 0

    def __call__(self, cloud_N3: FloatArray, *, up_axis: Axis, key: tuple[int, ...]) -> FloatArray:
        """Returns a cloud's scan [M, 3]; ``seed`` and the cloud's ``key`` determine the draws."""
        rng = np.random.default_rng([self.seed, *key])
        up = "xyz".index(up_axis)
        shifted = SHIFTS[self.kind](cloud_N3, up, self.strength, rng)
        return cloud_N3 if len(shifted) < _LEAST else shifted.astype(np.float32, copy=False)


_Shift = Callable[[FloatArray, int, float, Generator], FloatArray]


def _horizontal(up: int, rng: Generator) -> NDArray[np.float64]:
    """Draws a unit vector [3] that rises 0.1 to 0.7 rad above the horizontal plane."""
    turn, rise = rng.uniform(0, 2 * np.pi), rng.uniform(0.1, 0.7)
    direction_3 = np.empty(3)
    direction_3[(up + 1) % 3], direction_3[(up + 2) % 3] = np.cos(turn), np.sin(turn)
    direction_3 *= np.cos(rise)
    direction_3[up] = np.sin(rise)
    return direction_3


def _partial(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Keeps points visible from a random side: those nearest in each cell of a viewer's image."""
    toward_3 = _horizontal(up, rng)
    frame_33, _ = np.linalg.qr(np.column_stack([toward_3, rng.standard_normal((3, 2))]))
    image_N2 = cloud_N3 @ frame_33[:, 1:]
    depth_N = -(cloud_N3 @ toward_3)
    side = max(float(np.ptp(image_N2, axis=0).max()), 1e-12)
    cells_N2 = np.minimum((image_N2 - image_N2.min(0)) / side * _CELLS, _CELLS - 1).astype(int)
    cell_N = cells_N2[:, 0] * _CELLS + cells_N2[:, 1]
    nearest = np.full(_CELLS**2, np.inf)
    np.minimum.at(nearest, cell_N, depth_N)
    # A slanted surface has a range of depths within one cell.
    behind = (0.35 - 0.15 * strength) * side
    seen_N3: FloatArray = cloud_N3[depth_N <= nearest[cell_N] + max(behind, 2 * side / _CELLS)]
    return seen_N3


def _noisy(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Moves the points by noise, and adds outliers anywhere in their bounding box."""
    size = float(np.linalg.norm(cloud_N3.max(0) - cloud_N3.min(0)))
    noise_N3 = rng.standard_normal(cloud_N3.shape) * 0.015 * strength * size
    outliers = rng.uniform(
        cloud_N3.min(0), cloud_N3.max(0), (int(0.03 * strength * len(cloud_N3)), 3)
    )
    return np.concatenate([cloud_N3 + noise_N3, outliers]).astype(np.float32)


def _occluded(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Removes the points inside two balls, each around a random point."""
    for _ in range(2):
        middle_3 = cloud_N3[rng.integers(len(cloud_N3))]
        near = np.linalg.norm(cloud_N3 - middle_3, axis=1)
        size = float(np.linalg.norm(cloud_N3.max(0) - cloud_N3.min(0)))
        left = near > 0.18 * strength * size
        if left.sum() >= _LEAST:
            cloud_N3 = cloud_N3[left]
    return cloud_N3


def _density(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Thins the points out with increasing distance from a viewer on a random side."""
    along_N = cloud_N3 @ _horizontal(up, rng)
    share_N = (along_N - along_N.min()) / max(float(np.ptp(along_N)), 1e-12)
    left_N3: FloatArray = cloud_N3[
        rng.random(len(cloud_N3)) < np.exp(-3 * strength * (1 - share_N))
    ]
    return left_N3


def _rotated(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Turns the points about the vertical axis, then tilts them about a horizontal axis."""
    tilt = np.deg2rad(45 * strength) * rng.uniform(0.5, 1)
    turn = rng.uniform(0, 2 * np.pi)
    first, second = (up + 1) % 3, (up + 2) % 3
    about_up, about_first = np.eye(3), np.eye(3)
    about_up[[first, first, second, second], [first, second, first, second]] = (
        *(np.cos(turn), np.sin(turn)),
        *(-np.sin(turn), np.cos(turn)),
    )
    about_first[[second, second, up, up], [second, up, second, up]] = (
        *(np.cos(tilt), np.sin(tilt)),
        *(-np.sin(tilt), np.cos(tilt)),
    )
    return (cloud_N3 @ about_up @ about_first).astype(np.float32)


SHIFTS: dict[CloudShiftKind, _Shift] = {
    "none": lambda cloud_N3, up, strength, rng: cloud_N3,
    "partial": _partial,
    "noisy": _noisy,
    "occluded": _occluded,
    "density": _density,
    "rotated": _rotated,
}
