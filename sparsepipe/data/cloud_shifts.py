"""Shifts that make scans of CAD shapes: other domains of point clouds.

They act on the drawn points, before the grid is placed around them, as a scanner would; a shape is
shifted in the same way whenever it is read.

Shapes: N points, of which M are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from sparsepipe.data.augment import Axis
from sparsepipe.data.points import FloatArray
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Seed, checked

_CELLS = 24
"""Cells along each side of the image in which a view hides points."""
_LEAST = 16
"""Points that are left of a shape at least."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class CloudShift:
    """Shift of each cloud of a domain.

    Args:
        kind: one of :data:`SHIFTS`; ``none`` leaves clouds as they are.
        strength: 1 is usual; 0 to 2.
        seed: of what is drawn for each shape.

    Raises:
        ConfigError: an unknown kind, or a number out of its range.
    """

    kind: str = "none"
    strength: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.kind not in SHIFTS:
            raise ConfigError(
                f"data.shift.kind={self.kind!r} is not valid",
                remedy=f"choose one of {', '.join(SHIFTS)}",
            )

    def __call__(self, cloud_N3: FloatArray, *, up_axis: Axis, key: tuple[int, ...]) -> FloatArray:
        """The points [M, 3] of the scan; what is drawn depends on the seed and ``key``."""
        rng = np.random.default_rng([self.seed, *key])
        up = "xyz".index(up_axis)
        shifted = SHIFTS[self.kind](cloud_N3, up, self.strength, rng)
        return cloud_N3 if len(shifted) < _LEAST else shifted.astype(np.float32, copy=False)


_Shift = Callable[[FloatArray, int, float, Generator], FloatArray]


def _size_of(cloud_N3: FloatArray) -> float:
    return float(np.linalg.norm(cloud_N3.max(0) - cloud_N3.min(0)))


def _horizontal(up: int, rng: Generator) -> NDArray[np.float64]:
    """A random direction that is nearly horizontal, from above."""
    turn, rise = rng.uniform(0, 2 * np.pi), rng.uniform(0.1, 0.7)
    direction_3 = np.empty(3)
    direction_3[(up + 1) % 3], direction_3[(up + 2) % 3] = np.cos(turn), np.sin(turn)
    direction_3 *= np.cos(rise)
    direction_3[up] = np.sin(rise)
    return direction_3


def _partial(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Points seen from one side: in each cell of the view those nearest to the viewer."""
    toward_3 = _horizontal(up, rng)
    frame_33, _ = np.linalg.qr(np.column_stack([toward_3, rng.standard_normal((3, 2))]))
    image_N2 = cloud_N3 @ frame_33[:, 1:]
    depth_N = -(cloud_N3 @ toward_3)
    side = max(float(np.ptp(image_N2, axis=0).max()), 1e-12)
    cells_N2 = np.minimum((image_N2 - image_N2.min(0)) / side * _CELLS, _CELLS - 1).astype(int)
    cell_N = cells_N2[:, 0] * _CELLS + cells_N2[:, 1]
    nearest = np.full(_CELLS**2, np.inf)
    np.minimum.at(nearest, cell_N, depth_N)
    # A cell of the view has the depth of a slanted surface in it.
    behind = (0.35 - 0.15 * strength) * side
    seen_N3: FloatArray = cloud_N3[depth_N <= nearest[cell_N] + max(behind, 2 * side / _CELLS)]
    return seen_N3


def _noisy(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Noise on each point, and some points anywhere."""
    noise_N3 = rng.standard_normal(cloud_N3.shape) * 0.015 * strength * _size_of(cloud_N3)
    outliers = rng.uniform(
        cloud_N3.min(0), cloud_N3.max(0), (int(0.03 * strength * len(cloud_N3)), 3)
    )
    return np.concatenate([cloud_N3 + noise_N3, outliers]).astype(np.float32)


def _occluded(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Points that are not near either of two random ones."""
    for _ in range(2):
        middle_3 = cloud_N3[rng.integers(len(cloud_N3))]
        near = np.linalg.norm(cloud_N3 - middle_3, axis=1)
        left = near > 0.18 * strength * _size_of(cloud_N3)
        if left.sum() >= _LEAST:
            cloud_N3 = cloud_N3[left]
    return cloud_N3


def _density(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Fewer points the farther they are from a random side."""
    along_N = cloud_N3 @ _horizontal(up, rng)
    share_N = (along_N - along_N.min()) / max(float(np.ptp(along_N)), 1e-12)
    left_N3: FloatArray = cloud_N3[
        rng.random(len(cloud_N3)) < np.exp(-3 * strength * (1 - share_N))
    ]
    return left_N3


def _rotated(cloud_N3: FloatArray, up: int, strength: float, rng: Generator) -> FloatArray:
    """Tilted about a random horizontal axis, and turned about the vertical one."""
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


SHIFTS: dict[str, _Shift] = {
    "none": lambda cloud_N3, up, strength, rng: cloud_N3,
    "partial": _partial,
    "noisy": _noisy,
    "occluded": _occluded,
    "density": _density,
    "rotated": _rotated,
}
