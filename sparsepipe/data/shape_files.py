"""One shape from one file: a mesh, or a cloud of points, in any of the common formats.

Shapes: F faces, Q points of a cloud.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray

from sparsepipe.data.files import SHAPE_BYTES, check_regular, unreadable
from sparsepipe.data.mesh_rows import read_triangles, triangle_areas
from sparsepipe.data.npz_files import open_npz
from sparsepipe.data.off import MAX_COORDINATE
from sparsepipe.errors import DataError

TEXT_SUFFIXES = (".csv", ".txt", ".xyz")
"""Of clouds as text, a point in each line."""
_ARRAYS = (".npy", ".npz")
_MESHES = (".glb", ".obj", ".ply", ".stl")
SHAPE_SUFFIXES = tuple(sorted((*_ARRAYS, *_MESHES, ".off", *TEXT_SUFFIXES)))
"""Of files with a shape each, in lower case."""

_TEXT_BYTES = 1 << 28
"""Limit of a file of text, which takes several times its size in memory while it is read."""
_MOST_COLUMNS = 16
"""Of an array of points: coordinates, normals, colours and the like."""
_HEADER_LINES = 20
"""Lines before the first point of a text file; a header of the PCD format has 11."""
_COMMENT = re.compile(r"(#|//).*")
_NUMBERS = re.compile(r"\s*([^\s,;]+(,\d[^\s,;]*)?([\s;]+|$)){3,}")
"""Three or more words with at most one comma in each."""
_COMMA_BEFORE_LAST = re.compile(r",\d[^\s,;]*[\s;]+\S")
"""In a word that others follow."""
_UNIT = re.compile(r"[\[(][^\])]*[\])]")
"""Of a column, behind its name."""
_SEPARATORS = str.maketrans(",;\t", "   ")
_AXES = ("x", "y", "z")


def read_shape(path: str | os.PathLike[str]) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of a mesh, or points [Q, 3] of a cloud, in the units of the file.

    A file's suffix tells its format: ``.stl``, ``.obj``, ``.ply``, ``.glb`` and ``.off`` hold
    meshes, and all but ``.off`` also clouds, where they have no faces; ``.npy`` is an array
    [Q, 3 or more], ``.npz`` has such an array ``points``, or no other one. Text files (``.txt``,
    ``.xyz``, ``.csv``) have a point in each line, with numbers separated by blanks, commas or
    semicolons, between which commas may be decimal ones; they may have comments and a header, whose
    names x, y and z choose the columns. Other columns than the coordinates, such as normals, are
    not read. Nothing but the file itself is: no materials, no textures.

    Raises:
        DataError: the file is missing, no regular file, larger than 1 GiB (text: 256 MiB), of
            another format, or holds neither a surface nor finite points.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    check_shape_file(path)
    if suffix == ".off":
        return read_triangles(path)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            values = np.asarray(_read(path, suffix), np.float64)
    except DataError:
        raise
    except _Refused as error:
        raise _no_shape(path, error) from error
    except MemoryError as error:
        raise _no_shape(path, "its values would need more memory than there is") from error
    except OSError as error:
        raise (unreadable(path, error) if error.errno else _broken(path, error)) from error
    except Exception as error:  # each format's reader has its own
        raise _broken(path, error) from error
    return _checked(path, values)


def check_shape_file(path: Path) -> None:
    """Require a regular file of a format that holds a shape, and of a size that can be read.

    Raises:
        DataError: it is missing, or another one.
    """
    if path.suffix.lower() not in SHAPE_SUFFIXES:
        raise DataError(
            f"{path} is of no format that holds a shape",
            remedy=f"convert it to one of {', '.join(SHAPE_SUFFIXES)}",
        )
    is_text = path.suffix.lower() in TEXT_SUFFIXES
    check_regular(path, limit_bytes=_TEXT_BYTES if is_text else SHAPE_BYTES)


def as_shape(shape: Any) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of a mesh in memory, or points [Q, 3] of a cloud.

    Args:
        shape: a mesh, a scene or a cloud of trimesh, or points [Q, 3] as numpy or torch have them.

    Raises:
        DataError: it is none of these, or holds neither a surface nor finite points.
    """
    what = f"the {type(shape).__name__}"
    if isinstance(shape, trimesh.Scene):
        shape = _of_scene(shape)
    elif isinstance(shape, trimesh.Trimesh):
        shape = shape.triangles
    elif isinstance(shape, trimesh.PointCloud):
        shape = shape.vertices
    elif hasattr(shape, "detach"):  # torch's, which may be on a device
        shape = shape.detach().cpu().double()  # numpy has no bfloat16
    try:
        values = np.asarray(shape, np.float64)
    except (TypeError, ValueError) as error:
        raise _no_shape(what, error) from error
    return _checked(what, values)


def _checked(source: object, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.shape[1:] not in ((3,), (3, 3)):
        raise _no_shape(source, f"it has the shape {list(values.shape)}, not [points, 3]")
    if not len(values):
        end = "; it may be empty, cut off or of another format" if isinstance(source, Path) else ""
        raise _no_shape(source, f"it has no points{end}")
    if not np.isfinite(values).all():
        raise _no_shape(source, "some of its coordinates are not finite")
    if (farthest := np.abs(values).max()) > MAX_COORDINATE:
        raise _no_shape(source, f"coordinates reach {farthest:.3g}, more than {MAX_COORDINATE:g}")
    if values.ndim == 3 and not triangle_areas(values).sum() > 0:
        raise _no_shape(source, "its mesh has no surface")
    return values


def _read(path: Path, suffix: str) -> NDArray[Any]:
    if suffix == ".npy":
        return _coordinates(np.load(path, mmap_mode="r", allow_pickle=False))
    if suffix == ".npz":
        try:
            with open_npz(path) as arrays:
                names = arrays.names & {"points"} or arrays.names
                if len(names) != 1:
                    raise _Refused(f"it has no array points, but {sorted(names)[:5]}")
                return _coordinates(arrays.read(*names))
        except ValueError as error:  # it says what is wrong in whole words
            raise _Refused(str(error)) from error
    if suffix in TEXT_SUFFIXES:
        # Words of a header or a comment may be in another encoding: numbers are the same in it.
        return parse_points(path.read_text(encoding="utf-8-sig", errors="replace"))
    # From memory and without a resolver, so that no file is opened that this one names.
    scene = trimesh.load_scene(
        io.BytesIO(path.read_bytes()),
        file_type=suffix[1:],
        process=False,
        resolver={},
        skip_materials=True,
    )
    return _of_scene(scene)


def _of_scene(scene: trimesh.Scene) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of all its meshes, or points [Q, 3] of its clouds if it has no mesh."""
    if any(isinstance(part, trimesh.Trimesh) for part in scene.geometry.values()):
        triangles_F33: NDArray[np.float64] = scene.to_mesh().triangles
        return triangles_F33
    return np.concatenate([np.empty((0, 3)), *(part.vertices for part in scene.dump())])


def _coordinates(values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim != 2 or values.shape[1] < 3 or values.dtype.kind not in "iuf":
        raise _Refused(
            f"its array is of shape {values.shape} and type {values.dtype}, not [points, 3]"
        )
    if len(values) == 3 and values.shape[1] > _MOST_COLUMNS:
        raise _Refused(
            f"its array is of shape {values.shape}, which seems to be [3, points]: transpose it"
        )
    return values[:, :3]


def parse_points(text: str) -> NDArray[np.float64]:
    """Points [Q, 3] of lines of numbers, see :func:`read_shape`.

    Raises:
        ValueError: there is no point, or a line after the first point has no three numbers.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines[:_HEADER_LINES]) if _is_point(line)), None)
    if start is None:
        raise _Refused("it does not begin with lines of at least three numbers")
    header = next((line for line in reversed(lines[:start]) if line.strip()), "")
    rows = [_COMMENT.sub("", line) for line in islice(lines, start, None)]
    decimal = "." if _has_decimal_commas(rows) else " "
    plain = (line.replace(",", decimal).translate(_SEPARATORS) for line in rows)
    # Columns by their names where the header has them, since the first may be a number or a time.
    points_Q3: NDArray[np.float64] = np.loadtxt(plain, usecols=_columns(header), ndmin=2)
    return points_Q3


def _has_decimal_commas(rows: Sequence[str]) -> bool:
    """Whether commas in a file's lines are those of some countries' numbers.

    Where one line has a decimal point, or is no row of numbers then, they separate columns; as do
    commas between blanks that come before the last column alone, such as an intensity.
    """
    rows = [row for row in rows if row.strip()]
    return (
        any("," in row for row in rows)
        and not any("." in row for row in rows)
        and all(_NUMBERS.fullmatch(row) for row in rows)
        and any(";" in row or _COMMA_BEFORE_LAST.search(row) for row in rows)
    )


def _is_point(line: str) -> bool:
    words = _COMMENT.sub("", line).translate(_SEPARATORS).split()
    try:
        return len([float(word) for word in words[:3]]) == 3
    except ValueError:
        return False


def _columns(header: str) -> Sequence[int]:
    header = _UNIT.sub("", header).lower().replace('"', "").strip("#/ ")
    separator = next((each for each in ";,\t" if each in header), None)
    names = [name.strip() for name in header.split(separator)]  # the first may be empty
    return [names.index(axis) for axis in _AXES] if {*_AXES} <= {*names} else (0, 1, 2)


class _Refused(ValueError):
    """What is wrong with a file, in words of our own."""


def _broken(path: Path, error: Exception) -> DataError:
    """The error for a file that the reader of its format fails at."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    kind = path.suffix[1:].upper()
    return _no_shape(path, f"it cannot be read as {kind}, and may be damaged or cut off ({reason})")


def _no_shape(source: object, why: object) -> DataError:
    return DataError(
        f"{source} holds no shape: {str(why).splitlines()[0]}",
        remedy="replace it by a mesh, or by points [points, 3]",
    )
