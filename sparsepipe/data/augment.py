"""Augmentation of training shapes, in units of the grid.

Shapes: N points, 3 axes.

There are two stages. Rotation and mirroring act *before* the grid is placed around the shape, so
that a rotated shape still spans the grid. Scale, shift and jitter act *after* that, in the unit
cube (grid half width 1), because a grid that spans each shape's own extent would undo them.
Points that scale and shift move out of the grid are dropped (as if the shape were cropped) or
moved to its border. Jitter never drops a point, because half of every face on the border would
disappear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sparsepipe.data.points import FloatArray
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import checked

Axis = Literal["x", "y", "z"]

_Share = Annotated[float, Field(ge=0, le=1)]
_ROUNDING = np.float32(1e-4)
"""Distance from the grid, in half widths, below which a point outside is a rounding error."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Settings of the augmentation; every part is off by default.

    Args:
        enabled: false switches off all parts.
        scale: smallest and largest factor; [1, 1] is off.
        scale_per_axis: draw a factor for each axis instead of one for all.
        shift: largest shift along each axis, in grid half widths.
        jitter: standard deviation of the noise on each coordinate, in grid half widths.
        jitter_clip: largest noise, in grid half widths.
        rotate_deg: largest rotation about the vertical axis in either direction, in degrees.
        flip: probability of mirroring, for each horizontal axis.
        dropout: largest share of the points dropped at random; the share is drawn per shape.
        outside: ``drop`` or ``clamp`` points that scale and shift move out of the grid.

    Raises:
        ConfigError: a value is out of its range.
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
                f"data.augment.scale={list(factors)} is not valid",
                remedy="set it to two factors, 0 < smallest <= largest",
            )

    @property
    def rotates(self) -> bool:
        """Whether shapes are rotated or mirrored, so that their box must be measured again."""
        return self.enabled and (self.rotate_deg > 0 or self.flip > 0)

    def pose(self, rng: np.random.Generator, *, up_axis: Axis) -> FloatArray:
        """Random matrix [3, 3] of rotation and mirroring; apply it as ``points @ pose``."""
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
        """Points with dropout, scale, shift and jitter, in the unit cube; at least one is kept."""
        if not self.enabled:
            return unit_N3
        if self.dropout > 0:
            kept_N = rng.random(len(unit_N3)) >= rng.uniform(0, self.dropout)
            unit_N3 = unit_N3[kept_N] if kept_N.any() else unit_N3[:1]
        if tuple(self.scale) != (1.0, 1.0):
            low, high = self.scale
            factors = rng.uniform(low, high, 3 if self.scale_per_axis else 1)
            unit_N3 = unit_N3 * factors.astype(np.float32)
        if self.shift > 0:
            unit_N3 = unit_N3 + rng.uniform(-self.shift, self.shift, 3).astype(np.float32)
        if self.outside == "drop":
            inside_N = (np.abs(unit_N3) <= 1 + _ROUNDING).all(axis=1)
            unit_N3 = unit_N3[inside_N] if inside_N.any() else unit_N3
        if self.jitter > 0:
            noise_N3 = rng.standard_normal(unit_N3.shape, np.float32) * np.float32(self.jitter)
            unit_N3 = unit_N3 + np.clip(noise_N3, -self.jitter_clip, self.jitter_clip)
        return np.clip(unit_N3, -1, 1)
