"""Formats of files with one shape each: a mesh, or a cloud of points.

``READERS`` maps suffixes to readers. A new format needs a function from a path to triangles
[F, 3, 3] or points [Q, 3], in a file here, and a line in that table. Shapes: F faces, Q points.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, explaining_file
from sparsepipe.data.formats.clouds import (
    read_array_points,
    read_las,
    read_pcd_points,
    read_text_points,
)
from sparsepipe.data.formats.glb import load_glb
from sparsepipe.data.formats.obj import read_obj
from sparsepipe.data.formats.off import MAX_COORDINATE, read_off
from sparsepipe.data.formats.ply import read_ply
from sparsepipe.errors import DataError

_WITHOUT = "holds no shape that can be read"
_REMEDY = "restore it, or replace it with a mesh or an array of points [points, 3]"
_TEXT_BYTES, _SHAPE_BYTES = 1 << 28, 1 << 30
"""Size limits of text files of points, which take more memory when read, and of other files."""


def _read_stl(path: Path) -> NDArray[np.float64]:
    content = path.read_bytes()
    scene = trimesh.load_scene(io.BytesIO(content), file_type="stl", process=False, resolver={})
    is_binary = len(content) == 84 + 50 * int.from_bytes(content[80:84], "little")
    if not is_binary and b"facet" in content.lower().rpartition(b"endsolid")[2]:
        raise ValueError("it is cut off: its last solid has no end")
    return _scene_shape(scene)


def _read_xml(path: Path) -> NDArray[np.float64]:
    import_module("lxml" if path.suffix.lower() == ".3mf" else "collada")  # trimesh reads by these
    content, kind = io.BytesIO(path.read_bytes()), path.suffix[1:].lower()
    return _scene_shape(trimesh.load_scene(content, file_type=kind, process=False, resolver={}))


def _scene_shape(scene: trimesh.Scene) -> NDArray[np.float64]:
    if any(isinstance(part, trimesh.Trimesh) for part in scene.geometry.values()):
        triangles_F33: NDArray[np.float64] = scene.to_mesh().triangles
        return triangles_F33
    return np.concatenate([np.empty((0, 3)), *(part.vertices for part in scene.dump())])


READERS: dict[str, Callable[[Path], NDArray[Any]]] = {
    ".3mf": _read_xml,
    ".csv": read_text_points,
    ".dae": _read_xml,
    ".glb": lambda path: _scene_shape(load_glb(path)),
    ".gltf": lambda path: _scene_shape(load_glb(path)),
    ".las": lambda path: read_las(path)["coord"],
    ".laz": lambda path: read_las(path)["coord"],
    ".npy": read_array_points,
    ".npz": read_array_points,
    ".obj": read_obj,
    ".off": lambda path: read_off(path).triangles,
    ".pcd": read_pcd_points,
    ".ply": read_ply,
    ".pts": read_text_points,
    ".stl": _read_stl,
    ".txt": read_text_points,
    ".xyz": read_text_points,
}
"""The function that reads files of a suffix, by the suffix in lower case."""

SHAPE_SUFFIXES = tuple(READERS)


def read_shape(path: str | os.PathLike[str]) -> NDArray[np.float64]:
    """Returns triangles [F, 3, 3] of a mesh, or points [Q, 3] of a cloud, in the file's units.

    Only coordinates are read: no normals, colours, materials or files that the file refers to.

    Args:
        path: a file with a suffix of :data:`READERS`. ``.npy`` holds an array [Q, 3 or more],
            ``.npz`` such an array as ``points`` or as its only one; text has a point on each line.

    Raises:
        DataError: the file is missing, not regular, larger than 1 GiB (text: 256 MiB) or of another
            format, has no points or coordinates that are not finite, or its surface has no area.
    """
    path = Path(path)
    check_shape_file(path)
    with (
        explaining_file(path, what=_WITHOUT, extra="scenes", remedy=_REMEDY),
        np.errstate(all="ignore"),  # coordinates that are not finite are refused below
    ):
        return _checked_shape(np.asarray(READERS[path.suffix.lower()](path), np.float64))


def check_shape_file(path: Path) -> None:
    """Raises a DataError unless ``path`` is a regular file of a known format and allowed size."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} does not have the suffix of a mesh or cloud",
            remedy=f"convert it to one of {', '.join(READERS)}",
        )
    check_regular(path, limit_bytes=_TEXT_BYTES if reader is read_text_points else _SHAPE_BYTES)


def as_shape(shape: Any) -> NDArray[np.float64]:
    """Returns the checked triangles [F, 3, 3] of a mesh in memory, or points [Q, 3] of a cloud.

    Args:
        shape: a trimesh mesh, scene or point cloud, or points [Q, 3] in numpy or torch.
    """
    what = f"the {type(shape).__name__}"
    if isinstance(shape, trimesh.Scene):
        shape = _scene_shape(shape)
    elif isinstance(shape, trimesh.Trimesh):
        shape = shape.triangles
    elif isinstance(shape, trimesh.PointCloud):
        shape = shape.vertices
    elif hasattr(shape, "detach"):  # a torch tensor, which may be on a GPU
        shape = shape.detach().cpu().double()  # numpy has no bfloat16
    try:
        return _checked_shape(np.asarray(shape, np.float64))
    except (TypeError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{what} {_WITHOUT}: {why}", remedy=_REMEDY) from error


def triangle_areas(triangles_F33: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the area [F] of each triangle, in squared units of the coordinates."""
    edges_F3 = triangles_F33[:, 1] - triangles_F33[:, 0]
    others_F3 = triangles_F33[:, 2] - triangles_F33[:, 0]
    areas_F: NDArray[np.float64] = np.linalg.norm(np.cross(edges_F3, others_F3), axis=1) / 2
    return areas_F


def _checked_shape(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.shape[1:] not in ((3,), (3, 3)):
        shape = list(values.shape)
        raise ValueError(f"its array has the shape {shape}, not [points, 3] or [triangles, 3, 3]")
    if not np.abs(values).max(initial=0) <= MAX_COORDINATE:
        raise ValueError(f"coordinates are not finite, or larger than {MAX_COORDINATE:g}")
    if not len(values) or (values.ndim == 3 and not triangle_areas(values).sum() > 0):
        raise ValueError("it has no points, or a surface of zero area")
    return values
