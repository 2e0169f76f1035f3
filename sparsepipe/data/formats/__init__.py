"""Formats of files with one shape each: a mesh, or a cloud of points.

``READERS`` has the reader of each suffix. A new format is a function in a file here, from a path to
triangles [F, 3, 3] or points [Q, 3], and a line in that table.

Shapes: F faces, Q points of a cloud.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray

from sparsepipe.data.files import SHAPE_BYTES, check_regular, unreadable
from sparsepipe.data.formats.arrays import read_npy, read_npz
from sparsepipe.data.formats.meshes import read_by_trimesh, scene_shape
from sparsepipe.data.formats.off import MAX_COORDINATE, read_off
from sparsepipe.data.formats.text import read_text_points
from sparsepipe.errors import DataError

READERS: dict[str, Callable[[Path], NDArray[Any]]] = {
    ".csv": read_text_points,
    ".glb": read_by_trimesh,
    ".npy": read_npy,
    ".npz": read_npz,
    ".obj": read_by_trimesh,
    ".off": lambda path: read_off(path).triangles,
    ".ply": read_by_trimesh,
    ".stl": read_by_trimesh,
    ".txt": read_text_points,
    ".xyz": read_text_points,
}
"""The reader of each suffix, in lower case."""

SHAPE_SUFFIXES = tuple(READERS)
TEXT_SUFFIXES = tuple(suffix for suffix, read in READERS.items() if read is read_text_points)
_TEXT_BYTES = 1 << 28
"""Limit of a file of text, which takes several times its size in memory while it is read."""


def read_shape(path: str | os.PathLike[str]) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of a mesh, or points [Q, 3] of a cloud, in the units of the file.

    Only coordinates are read, and no other file that this one names: no normals, no colours, no
    materials.

    Args:
        path: a file with a suffix of :data:`READERS`. ``.npy`` is an array [Q, 3 or more], ``.npz``
            has such an array, named ``points`` or its only one; text has a point in each line.

    Raises:
        DataError: the file is missing, not regular, larger than 1 GiB (text: 256 MiB), of another
            format, or holds neither a surface nor finite points.
    """
    path = Path(path)
    check_shape_file(path)
    try:
        with np.errstate(all="ignore"):  # coordinates that are not finite are refused below
            values = np.asarray(READERS[path.suffix.lower()](path), np.float64)
    except DataError:
        raise
    except Exception as error:  # each format's reader has its own
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from error
        raise _without_shape(
            path,
            f"it cannot be read as {path.suffix[1:].upper()}, and may be damaged or cut off "
            f"({type(error).__name__}: {error})",
        ) from error
    return _checked_shape(path, values)


def check_shape_file(path: Path) -> None:
    """Require a regular file of a known format, and of a size that can be read.

    Raises:
        DataError: it is missing, or another one.
    """
    if path.suffix.lower() not in READERS:
        raise DataError(
            f"{path} has no suffix of a format that holds a shape",
            remedy=f"convert it to one of {', '.join(READERS)}",
        )
    is_text = path.suffix.lower() in TEXT_SUFFIXES
    check_regular(path, limit_bytes=_TEXT_BYTES if is_text else SHAPE_BYTES)


def as_shape(shape: Any) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of a mesh in memory, or points [Q, 3] of a cloud.

    Args:
        shape: a mesh, a scene or a cloud of trimesh, or points [Q, 3] in numpy or torch.

    Raises:
        DataError: it is of another kind, or holds neither a surface nor finite points.
    """
    what = f"the {type(shape).__name__}"
    if isinstance(shape, trimesh.Scene):
        shape = scene_shape(shape)
    elif isinstance(shape, trimesh.Trimesh):
        shape = shape.triangles
    elif isinstance(shape, trimesh.PointCloud):
        shape = shape.vertices
    elif hasattr(shape, "detach"):  # torch's, which may be on a device
        shape = shape.detach().cpu().double()  # numpy has no bfloat16
    try:
        values = np.asarray(shape, np.float64)
    except (TypeError, ValueError) as error:
        raise _without_shape(what, str(error)) from error
    return _checked_shape(what, values)


def triangle_areas(triangles_F33: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area of each triangle, in squared units of the file."""
    edges_F3 = triangles_F33[:, 1] - triangles_F33[:, 0]
    others_F3 = triangles_F33[:, 2] - triangles_F33[:, 0]
    areas_F: NDArray[np.float64] = np.linalg.norm(np.cross(edges_F3, others_F3), axis=1) / 2
    return areas_F


def _checked_shape(source: object, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.shape[1:] not in ((3,), (3, 3)):
        raise _without_shape(source, f"it has the shape {list(values.shape)}, not [points, 3]")
    if not len(values):
        raise _without_shape(source, "it has no points; a file may be empty or cut off")
    if not np.isfinite(values).all():
        raise _without_shape(source, "some of its coordinates are not finite")
    if (farthest := np.abs(values).max()) > MAX_COORDINATE:
        raise _without_shape(
            source, f"coordinates reach {farthest:.3g}, more than {MAX_COORDINATE:g}"
        )
    if values.ndim == 3 and not triangle_areas(values).sum() > 0:
        raise _without_shape(source, "its mesh has no surface")
    return values


def _without_shape(source: object, why: str) -> DataError:
    return DataError(
        f"{source} holds no shape: {why.splitlines()[0]}",
        remedy="replace it by a mesh, or by points [points, 3]",
    )
