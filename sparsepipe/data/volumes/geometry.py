"""Where the voxels of a volume are: sizes, spacing and place in the world.

Shapes: D spatial dimensions, 1 to 3.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.errors import DataError

_DIRECTIONS = ("LR", "PA", "IS")
"""Letters of the directions against and along each axis of the world (RAS+)."""
WORLD_AXIS = {letter: axis for axis, letters in enumerate(_DIRECTIONS) for letter in letters}
"""The axis of the world of each direction."""
_SAME_PLACE = 0.1
"""Distance, in voxels, up to which rounded affines may move files that belong together."""
_ORDERS = ((".tif", ".tiff"), (".nii", ".nii.gz", ".nrrd", ".mha"))
"""Suffixes of files with axes in the order z, y, x, and in the order x, y, z."""
Known = Literal["nothing", "spacing", "place"]
"""What a file says of its voxels: where they are, only how large they are, or neither."""


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Where the voxels of a volume are.

    Attributes:
        sizes: number of voxels along each of the D spatial axes, in the order of the array's axes.
        affine_44: from indices of voxels, in this order and 0 for axes beyond D, to mm in the
            world, whose axes point right, anterior and superior (RAS+).
        known: what the file says; ``spacing``: the affine only scales; ``nothing``: it is the
            identity.
        file: path of the file, for messages.
    """

    sizes: tuple[int, ...]
    affine_44: NDArray[np.float64]
    known: Known
    file: str = ""

    @property
    def spacing(self) -> tuple[float, ...]:
        """Distance of neighbouring voxels along each of the D axes in mm."""
        return tuple(np.linalg.norm(self.affine_44[:3, : len(self.sizes)], axis=0).tolist())

    @property
    def axes(self) -> str:
        """Letters of the directions to which the D axes point, or nearly so, such as RAS."""
        cosines_3D = self.affine_44[:3, : len(self.sizes)] / self.spacing
        nearest = max(  # of the pairings of the array's axes with those of the world
            itertools.permutations(range(3), len(self.sizes)),
            key=lambda order: sum(abs(cosines_3D[row, axis]) for axis, row in enumerate(order)),
        )
        return "".join(
            _DIRECTIONS[row][int(cosines_3D[row, axis] > 0)] for axis, row in enumerate(nearest)
        )

    def __str__(self) -> str:
        sides = " x ".join(f"{side:.3g}" for side in self.spacing)
        return f"{self.axes} of {sides} mm" if self.known == "place" else f"{sides} mm"

    def check_same_grid(self, other: Geometry) -> None:
        """Raises a DataError if another volume's voxels are elsewhere, by more than 0.1 voxels.

        Of volumes without a known place only the spacing is compared, without that only the sizes.
        A TIFF file, whose axes are z, y, x, is not on the grid of a format with x, y, z.
        """
        known = {self.known, other.known}
        moved_44 = self.affine_44 - other.affine_44
        if known != {"place"}:
            sides = zip(self.spacing, other.spacing, strict=False)
            moved_44 = np.diag([*(one - two for one, two in sides), 0, 0, 0][:4])
            moved_44 *= "nothing" not in known
        ends = [(0, size - 1) for size in (*self.sizes, 1, 1)[:3]]
        corners_84 = np.array([(*corner, 1) for corner in itertools.product(*ends)])
        apart = np.linalg.norm(corners_84 @ moved_44.T, axis=1).max() / min(self.spacing)
        names = [self.file.lower(), other.file.lower()]
        turned = all(any(name.endswith(each) for name in names) for each in _ORDERS)
        if self.sizes != other.sizes or apart > _SAME_PLACE or (turned and len(self.sizes) > 1):
            raise DataError(
                f"{self.file} {list(self.sizes)} ({self}) and {other.file} {list(other.sizes)} "
                f"({other}) are not on the same voxels: they are up to {apart:.3g} voxels apart, "
                "or differ in sizes or in the order of axes, which is z, y, x in TIFF files only",
                remedy="resample the second to the grid of the first; or, if they do belong "
                "voxel by voxel, write it with the affine of the first, in the same format",
            )
