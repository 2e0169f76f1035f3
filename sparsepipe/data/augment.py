"""Random variation of training shapes, in units that mean something to the grid.

Shapes: N points, 3 axes.

Two stages. Turning and mirroring act on the shape in its own proportions, *before* the
grid is laid around it, so a turned shape still spans the grid. Scale, shift and jitter
act *after* that, in the unit cube (grid half width 1): were they applied before, a grid
that spans each shape's own extent would undo them. Points that scale and shift move out of
the grid are dropped (as if the shape were cropped) or moved to its border. Jitter never
drops a point: half of each face that lies on the border would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.points import FloatArray
from sparsepipe.errors import ConfigError

Axis = Literal["x", "y", "z"]

_ROUNDING = np.float32(1e-4)
"""A point this little beyond the grid, in its half widths, was put there by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Settings of the augmentation; every part is off at its default.

    Args:
        enabled: false switches all parts off at once.
        scale: smallest and largest factor; [1, 1] is off.
        scale_per_axis: draw one factor for each axis instead of one for all.
        shift: largest shift along each axis, in grid half widths.
        jitter: standard deviation of the noise on each coordinate, in grid half widths.
        jitter_clip: largest noise, in grid half widths.
        rotate_deg: largest turn about the vertical axis either way, in degrees; 180 is any.
        flip: probability of mirroring, for each horizontal axis.
        dropout: largest share of the points dropped at random; the share is drawn per shape.
        outside: what happens to points that scale and shift move out of the grid, ``drop``
            or ``clamp``.

    Raises:
        ConfigError: a value is out of its range.
    """

    enabled: bool = True
    scale: Sequence[float] = (1.0, 1.0)
    scale_per_axis: bool = True
    shift: float = 0.0
    jitter: float = 0.0
    jitter_clip: float = 0.05
    rotate_deg: float = 0.0
    flip: float = 0.0
    dropout: float = 0.0
    outside: Literal["drop", "clamp"] = "drop"

    def __post_init__(self) -> None:
        factors = tuple(float(factor) for factor in self.scale)
        object.__setattr__(self, "scale", factors)
        if len(factors) != 2 or not 0 < factors[0] <= factors[1]:
            _refuse("scale", list(factors), "two factors, 0 < smallest <= largest")
        for name, largest in (
            ("shift", 1.0),
            ("jitter", 1.0),
            ("jitter_clip", 1.0),
            ("rotate_deg", 180.0),
            ("flip", 1.0),
        ):
            if not 0 <= getattr(self, name) <= largest:
                _refuse(name, getattr(self, name), f"a number from 0 to {largest:g}")
        if not 0 <= self.dropout < 1:
            _refuse("dropout", self.dropout, "a share from 0 to below 1")
        if self.outside not in ("drop", "clamp"):
            _refuse("outside", self.outside, "drop or clamp")

    @property
    def turns(self) -> bool:
        """Whether shapes are turned or mirrored, so that their box must be measured anew."""
        return self.enabled and (self.rotate_deg > 0 or self.flip > 0)

    def pose(self, rng: np.random.Generator, *, up_axis: Axis) -> FloatArray:
        """Matrix [3, 3] that turns and mirrors a shape; apply as ``points @ pose``."""
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
        """Scaled, shifted, jittered points inside the unit cube; at least one remains."""
        if not self.enabled:
            return unit_N3
        if self.dropout > 0:
            kept_N = rng.random(len(unit_N3)) >= rng.uniform(0, self.dropout)
            unit_N3 = unit_N3[kept_N] if kept_N.any() else unit_N3[:1]
        if tuple(self.scale) != (1.0, 1.0):
            low, high = self.scale
            unit_N3 = unit_N3 * _float32(rng.uniform(low, high, 3 if self.scale_per_axis else 1))
        if self.shift > 0:
            unit_N3 = unit_N3 + _float32(rng.uniform(-self.shift, self.shift, 3))
        if self.outside == "drop":
            inside_N = (np.abs(unit_N3) <= 1 + _ROUNDING).all(axis=1)
            unit_N3 = unit_N3[inside_N] if inside_N.any() else unit_N3
        if self.jitter > 0:
            noise_N3 = rng.standard_normal(unit_N3.shape, np.float32) * np.float32(self.jitter)
            unit_N3 = unit_N3 + np.clip(noise_N3, -self.jitter_clip, self.jitter_clip)
        return np.clip(unit_N3, -1, 1)


def _float32(values: NDArray[np.float64]) -> FloatArray:
    return values.astype(np.float32)


def _refuse(name: str, value: object, expected: str) -> None:
    raise ConfigError(
        f"data.augment.{name}={value} cannot be used",
        remedy=f"set data.augment.{name} to {expected}",
    )
