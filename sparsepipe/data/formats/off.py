"""Reading and writing OFF meshes, including irregular files.

ModelNet's files join the header and the counts (``OFF490 518 0``) and contain duplicate and
degenerate faces; other collections have comments, polygons, colour columns, or all numbers in one
line. Such files are read. Shapes: V vertices, F faces.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import trimesh

from sparsepipe.data.files import check_regular
from sparsepipe.data.formats.polygons import triangulate
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing

READER_VERSION = 2
"""Increased with any change to the shapes read from files of any format; caches depend on it."""

# The format's optional prefixes ST (texture), C (colour) and N (normal) add columns, which are not
# read, after the three coordinates. "4" and "n" change the coordinates themselves and are not
# supported.
_HEADER = re.compile(r"(?:ST)?C?N?OFF", re.IGNORECASE)
_COMMENT = re.compile(r"#[^\r\n]*")
_DEGENERATE_SHARE = 1e-14
"""Faces with a smaller area than this share of the squared extent are taken for rounding errors."""
_MAX_COORDINATE = 1e30
"""Largest accepted coordinate: products of a few coordinates do not overflow."""
_MAX_DECIMALS = 17
"""Most decimal digits of the largest coordinate: vertices are compared as 64-bit integers."""
_SIGNIFICANT_DIGITS = 8
"""Decimal digits, relative to the extent, kept in writing and compared in merging vertices."""


def read_off(path: str | os.PathLike[str]) -> trimesh.Trimesh:
    """Reads an OFF file as a triangle mesh suitable for sampling by area.

    Polygons are triangulated, coincident vertices merged, and unused vertices removed;
    degenerate and duplicate faces are removed (two faces with the same three corners are
    duplicates regardless of their winding). The scale is kept. Invalid files raise a DataError.

    Args:
        path: the file; joined headers, comments, blank lines, CRLF, colour columns and the
            COFF, NOFF and STOFF variants are supported, as are files without extra columns whose
            vertices and faces do not each have a line of their own.
    """
    path = Path(path)
    check_regular(path)
    # Only comments can contain characters other than ASCII, and comments are dropped.
    text = _COMMENT.sub("", path.read_bytes().decode("utf-8-sig", errors="replace")).strip()
    try:
        header = _HEADER.match(text)
        if header is None:
            begin = repr(text[:20].splitlines()[0]) if text else "nothing"
            raise ValueError(f"it is not an OFF file of 3D points: it begins with {begin}")
        rows = [words for words in map(str.split, text[header.end() :].splitlines()) if words]
        mesh = _parsed(rows, is_plain=len(header.group()) == 3)
        if len(mesh.faces):
            extent = float(np.ptp(mesh.vertices, axis=0).max())
            # Relative to the extent: trimesh's own tolerance is absolute, and would collapse a
            # small model in metres or miss duplicates of a large one in millimetres.
            mesh.merge_vertices(digits_vertex=_decimals(mesh.vertices))
            solid_F = mesh.area_faces > _DEGENERATE_SHARE * extent * extent
            mesh.update_faces(solid_F & mesh.unique_faces())
            mesh.remove_unreferenced_vertices()
        if not len(mesh.faces) or not mesh.area > 0:
            raise ValueError("the mesh has zero area: every face is degenerate")
        return mesh
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: {error}",
            remedy="restore the file from its source, or remove it from the data set",
        ) from error


def _parsed(rows: list[list[str]], *, is_plain: bool) -> trimesh.Trimesh:
    """Builds a mesh from the words of each line, the counts first; quads' triangles come last."""
    if rows and len(rows[0]) == 1:
        rows = [[word for row in rows for word in row]]
    if not rows or len(rows[0]) < 2:
        raise ValueError("its header lacks the numbers of vertices and faces")
    num_vertices, num_faces = map(int, rows[0][:2])
    lines = (is_plain and _regrouped(rows, num_vertices, num_faces)) or rows[1:]
    if num_vertices < 1 or num_faces < 1 or num_vertices + num_faces > len(lines):
        raise ValueError(
            "it is truncated or empty: the numbers of vertices and faces in its header are "
            f"{num_vertices} and {num_faces}, but that of the lines below is {len(lines)}"
        )
    vertices_V3 = np.array([words[:3] for words in lines[:num_vertices]], np.float64)
    vertices_V3 = vertices_V3.reshape(num_vertices, 3)
    corners, counts = list[str](), list[int]()
    for number, (count, *words) in enumerate(lines[num_vertices : num_vertices + num_faces]):
        counts.append(int(count))
        if not len(words) >= counts[-1] > 0:
            raise ValueError(
                f"face {number} should be a count of corners, at least 1, and that many vertex "
                f"numbers; its count is {count}, and {len(words)} values follow"
            )
        corners += words[: counts[-1]]
    if not np.abs(vertices_V3).max() <= _MAX_COORDINATE:
        raise ValueError(f"coordinates are not finite, or larger than {_MAX_COORDINATE:g}")
    faces_F3, kinds_F = triangulate(vertices_V3, np.array(corners, np.int64), counts)
    faces_F3 = faces_F3[np.argsort(kinds_F % 3, kind="stable")]
    return trimesh.Trimesh(vertices_V3, faces_F3, process=False)


def _regrouped(rows: list[list[str]], num_vertices: int, num_faces: int) -> list[list[str]] | None:
    """Returns a row for each vertex and face if lines are cut otherwise and no word is left over.

    A file whose lines are vertices or faces has lost lines if there are not enough of them.
    """
    lines, words = rows[1:], [word for row in [rows[0][3:], *rows[1:]] for word in row]
    if len(lines) >= num_vertices + num_faces:
        faces = lines[num_vertices : num_vertices + num_faces]
        is_by_line = all(len(line) > 2 for line in lines[:num_vertices]) and all(
            not line[0].isdecimal() or len(line) > int(line[0]) for line in faces
        )
    else:
        is_by_line = all(len(line) == 3 or line[0] == str(len(line) - 1) for line in lines)
    if (is_by_line and lines) or 3 * num_vertices + 2 * num_faces > len(words):
        return None
    found = [words[at : at + 3] for at in range(0, 3 * num_vertices, 3)]
    at = 3 * num_vertices
    for _ in range(num_faces):
        end = at + 1 + (int(words[at]) if at < len(words) and words[at].isdecimal() else 0)
        found.append(words[at:end])
        at = end
    return found if at == len(words) else None


def write_off(mesh: trimesh.Trimesh, path: Path) -> None:
    """Writes ``mesh`` to an OFF file atomically, and creates its folder if necessary.

    Coordinates keep 8 decimal digits relative to the mesh's extent.
    """
    text = mesh.export(file_type="off", digits=max(_decimals(mesh.vertices), 0))
    # Thousands are written in a row: waiting for the disk after each would take minutes.
    with replacing(path, durable=False) as temporary:
        temporary.write_text(text, encoding="ascii")


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
