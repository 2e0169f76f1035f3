"""Clouds of points in numpy's files: an array in ``.npy``, or one of those in ``.npz``.

Shapes: Q points.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_COLUMNS = 16
"""Coordinates, normals, colours and the like; an array [3, more] is taken for [3, points]."""


def read_npy(path: Path) -> NDArray[Any]:
    """Points [Q, 3], the first three columns of the array.

    Raises:
        ValueError: it is not an array of numbers [points, 3 or more].
    """
    return _coordinates(np.load(path, mmap_mode="r", allow_pickle=False))


def read_npz(path: Path) -> NDArray[Any]:
    """Points [Q, 3] of the array ``points``, or of the only array.

    Raises:
        ValueError: the array is missing, or its values are not numbers [points, 3 or more].
    """
    with np.load(path, allow_pickle=False) as arrays:
        names = {*arrays.files} & {"points"} or {*arrays.files}
        if len(names) != 1:
            raise ValueError(f"it has no array points, but {', '.join(sorted(names)[:5])}")
        return _coordinates(arrays[names.pop()])


def _coordinates(values_QC: NDArray[Any]) -> NDArray[Any]:
    is_table = values_QC.ndim == 2 and values_QC.shape[1] >= 3 and values_QC.dtype.kind in "iuf"
    if not is_table or (len(values_QC) == 3 and values_QC.shape[1] > _MOST_COLUMNS):
        raise ValueError(
            f"its array has the shape {values_QC.shape} and type {values_QC.dtype}, and is not of "
            "numbers [points, 3]"
        )
    return values_QC[:, :3]
