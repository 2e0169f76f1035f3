"""Readers of point clouds in numpy's formats, and in text with a point on each line.

Shapes: Q points.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_COLUMNS = 16
"""Most columns of an array of three points; a wider array is probably [3, points]."""
_HEADER_LINES = 20
"""The first point must be within this many lines of a text; the PCD format's header has 11."""
_COMMENT = re.compile(r"(#|//).*")
_WORD = re.compile(r"\w+")


def read_array_points(path: Path) -> NDArray[Any]:
    """Returns points [Q, 3], the first three columns of the array in an ``.npy`` file.

    In an ``.npz`` file, that array is ``points`` or, without this name, the only one.
    """
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(found, np.lib.npyio.NpzFile):
        with found as arrays:
            names = {*arrays.files} & {"points"} or {*arrays.files}
            if len(names) != 1:
                some = ", ".join(sorted(names)[:5]) or "none"
                raise ValueError(f"it has no array named points; its arrays: {some}")
            found = arrays[names.pop()]
    is_table = found.ndim == 2 and found.shape[1] >= 3 and found.dtype.kind in "iuf"
    if not is_table or (len(found) == 3 and found.shape[1] > _MOST_COLUMNS):
        raise ValueError(
            f"its array, of shape {list(found.shape)} and type {found.dtype}, is not a table of "
            "numbers [points, 3]"
        )
    coordinates_Q3: NDArray[Any] = found[:, :3]
    return coordinates_Q3


def read_text_points(path: Path) -> NDArray[np.float64]:
    """Returns points [Q, 3]: the columns that a header names x, y and z, or else the first three.

    Numbers are separated by semicolons, commas or blanks, whichever of these the first point has; a
    number with a decimal comma is refused. Lines may end with a comment after ``#`` or ``//``.
    """
    # A header or a comment may be in another encoding, in which numbers are the same.
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    for start, line in enumerate(lines[:_HEADER_LINES]):  # noqa: B007
        delimiter = next((each for each in ";," if each in line), None)
        try:
            if len([float(word) for word in _COMMENT.sub("", line).split(delimiter)[:3]]) == 3:
                break
        except ValueError:
            continue
    else:
        raise ValueError(f"none of its first {_HEADER_LINES} lines begins with three numbers")
    header = next((line for line in reversed(lines[:start]) if line.strip()), "")
    words = [_WORD.search(name) for name in header.lower().strip("#/ ").split(delimiter)]
    names = [word.group() if word else "" for word in words]  # "x [m]" is the column x
    columns = [names.index(axis) for axis in "xyz"] if {*"xyz"} <= {*names} else [0, 1, 2]
    points_Q3: NDArray[np.float64] = np.loadtxt(
        lines[start:], delimiter=delimiter, usecols=columns, comments=["#", "//"], ndmin=2
    )
    return points_Q3
