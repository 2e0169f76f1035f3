"""Reading and writing OFF meshes by trimesh, including irregular files.

ModelNet's files join the header and the counts (``OFF490 518 0``) and contain duplicate and
degenerate faces; other collections have comments, polygons and colour columns. Such files are
read; corrupt ones raise an error with the file, the fault and a remedy.

Shapes: V vertices, F faces.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import trimesh

from sparsepipe.data.files import UnreadableError, unreadable
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing

READER_VERSION = 1
"""Increased with any change that reads a file as other triangles; caches depend on it."""

# The format's optional prefixes ST (texture), C (colour) and N (normal) add columns after the
# three coordinates, which the loader ignores. "4" and "n" change the coordinates themselves
# and are not supported.
_HEADER = re.compile(r"(?:ST)?C?N?OFF", re.IGNORECASE)
_COMMENT = re.compile(r"#[^\r\n]*")
_MAX_LOADED_CORNERS = 4
"""Corners of the largest faces that the loader triangulates."""
_DEGENERATE_SHARE = 1e-14
"""Faces with a smaller area than this share of the squared extent are rounding errors."""
MAX_COORDINATE = 1e30
"""Limit of coordinates, beyond which squares overflow."""
_MAX_DECIMALS = 17
"""Digits of the largest coordinate, because vertices are compared as 64-bit integers."""
_SIGNIFICANT_DIGITS = 8
"""Digits relative to the extent, used when writing and when merging vertices."""


def read_off(path: str | os.PathLike[str]) -> trimesh.Trimesh:
    """Read an OFF file as a triangle mesh fit for sampling by area.

    Polygons are triangulated, vertices at the same place merged and unused ones dropped;
    degenerate and duplicate faces are removed (two faces with the same three corners are
    duplicates regardless of their winding). The scale is kept.

    Args:
        path: the file; joined headers, comments, blank lines, CRLF, colour columns and the
            COFF, NOFF and STOFF variants are supported.

    Raises:
        DataError: the file is missing, empty, not an OFF file, truncated, has vertices that are
            not finite, faces with invalid vertex numbers, or no face of positive area.
    """
    path = Path(path)
    lines, num_vertices = _split(path, _read_text(path))
    vertex_lines, face_lines = lines[:num_vertices], lines[num_vertices:]
    try:
        triangles_and_quads = _without_polygons(face_lines)
        counts = f"{num_vertices} {len(triangles_and_quads)} 0"
        text = "\n".join(["OFF", counts, *vertex_lines, *triangles_and_quads])
        mesh = trimesh.load_mesh(io.BytesIO(text.encode()), file_type="off", process=False)
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        fault = _first_fault(vertex_lines, face_lines) or str(error)
        raise _corrupt(path, fault) from error
    if not np.isfinite(mesh.vertices).all():
        bad = int(np.flatnonzero(~np.isfinite(mesh.vertices).all(axis=1))[0])
        raise _corrupt(path, f"vertex {bad} is not finite (NaN or infinite)")
    return _clean(path, mesh)


def write_off(mesh: trimesh.Trimesh, path: Path) -> None:
    """Write ``mesh`` as an OFF file, atomically; creates the folder.

    Coordinates keep 8 decimal digits relative to the mesh's extent. The caller explains errors
    of the file system.
    """
    text = mesh.export(file_type="off", digits=max(_decimals(mesh.vertices), 0))
    # Thousands are written at once: waiting for the disk after each would take minutes.
    with replacing(path, durable=False) as temporary:
        temporary.write_text(text, encoding="ascii")


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UnreadableError(
            f"{path} does not exist", remedy="check the path and the data set's root"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    # Only comments can contain characters other than ASCII, and comments are dropped.
    text = _COMMENT.sub("", raw.decode("utf-8-sig", errors="replace")).strip()
    if not text:
        raise _corrupt(path, "the file is empty")
    return text


def _split(path: Path, text: str) -> tuple[list[str], int]:
    """The lines of all vertices and then faces, and the number of vertices."""
    header = _HEADER.match(text)
    if header is None:
        raise DataError(
            f"{path} is not an OFF file of three-dimensional points: "
            f"it begins with {text[:20].splitlines()[0]!r}",
            remedy="convert it to a text OFF file, or remove it from the data set",
        )
    lines = [line for line in map(str.strip, text[header.end() :].splitlines()) if line]
    counts = lines[0].split() if lines else []
    if len(counts) < 2 or not all(count.isdecimal() for count in counts[:2]):
        found = repr(lines[0][:40]) if lines else "nothing"
        raise _corrupt(path, f"the header has no vertex and face counts, but {found}")
    num_vertices, num_faces = int(counts[0]), int(counts[1])
    if num_vertices == 0 or num_faces == 0:
        what = "vertices" if num_vertices == 0 else "faces"
        raise _corrupt(path, f"the mesh has no {what}")
    missing = 1 + num_vertices + num_faces - len(lines)
    if missing > 0:
        raise _corrupt(
            path,
            f"truncated: the header promises {num_vertices} vertices and {num_faces} faces, "
            f"{missing} of their lines are missing",
        )
    return lines[1 : 1 + num_vertices + num_faces], num_vertices


def _without_polygons(face_lines: list[str]) -> list[str]:
    """The faces, those with more than four corners as fans of triangles.

    The loader cannot triangulate polygons in text files, and accepts a face that lacks corners.
    """
    lines = []
    for line in face_lines:
        words = line.split()
        corners = int(words[0])
        if not 1 <= corners < len(words):
            raise ValueError("a face lacks corners")
        if corners <= _MAX_LOADED_CORNERS:
            lines.append(line)
        else:
            lines += [f"3 {words[1]} {words[i]} {words[i + 1]}" for i in range(2, corners)]
    return lines


def _first_fault(vertex_lines: list[str], face_lines: list[str]) -> str | None:
    """Description of the first invalid vertex or face line; None if all are valid."""
    for number, line in enumerate(vertex_lines):
        if not _are_all(float, line.split()[:3], count=3):
            return f"vertex {number} is not three numbers: {line[:60]!r}"
    for number, line in enumerate(face_lines):
        count, *corners = line.split()
        if not _is_count(count) or not _are_all(int, corners[: int(count)], count=int(count)):
            return f"face {number} is not a count with that many corners: {line[:60]!r}"
        for corner in map(int, corners[: int(count)]):
            if not 0 <= corner < len(vertex_lines):
                return f"face {number} refers to vertex {corner} of {len(vertex_lines)}"
    return None


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _are_all(kind: type[float] | type[int], words: Sequence[str], *, count: int) -> bool:
    try:
        return len([kind(word) for word in words]) == count
    except ValueError:
        return False


def _clean(path: Path, mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    if len(mesh.faces):
        farthest = float(np.abs(mesh.vertices).max())
        if farthest > MAX_COORDINATE:
            raise _corrupt(path, f"coordinates reach {farthest:.3g}, more than {MAX_COORDINATE:g}")
        extent = float(np.ptp(mesh.vertices, axis=0).max())
        # Relative to the extent: trimesh's own tolerance is absolute, and would collapse a
        # small model in metres or miss duplicates of a large one in millimetres.
        mesh.merge_vertices(digits_vertex=_decimals(mesh.vertices))
        solid_F = mesh.area_faces > _DEGENERATE_SHARE * extent * extent
        mesh.update_faces(solid_F & mesh.unique_faces())
        mesh.remove_unreferenced_vertices()
    if not len(mesh.faces) or not mesh.area > 0:
        raise _corrupt(path, "the mesh has zero area: every face is degenerate")
    return mesh


def _decimals(vertices_V3: np.ndarray) -> int:
    extent = float(np.ptp(vertices_V3, axis=0).max()) if len(vertices_V3) else 0.0
    if not 0 < extent < np.inf:
        return _SIGNIFICANT_DIGITS
    # Far from the origin, double precision has fewer decimals.
    farthest = float(np.abs(vertices_V3).max())
    return min(
        _SIGNIFICANT_DIGITS - int(np.ceil(np.log10(extent))),
        _MAX_DECIMALS - int(np.ceil(np.log10(farthest))),
    )


def _corrupt(path: Path, fault: str) -> DataError:
    return DataError(
        f"{path}: {fault}",
        remedy="restore the file from its source, or remove it from the data set",
    )
