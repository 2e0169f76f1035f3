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

from sparsepipe.data.formats.polygons import triangulate
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
MAX_COORDINATE = 1e30
"""Largest accepted coordinate: products of a few coordinates do not overflow."""
_MAX_DECIMALS = 17
"""Most decimal digits of the largest coordinate: vertices are compared as 64-bit integers."""
_SIGNIFICANT_DIGITS = 8
"""Decimal digits, relative to the extent, kept in writing and compared in merging vertices."""


def read_off(path: str | os.PathLike[str]) -> trimesh.Trimesh:
    """Reads an OFF file as a triangle mesh suitable for sampling by area.

    Polygons are triangulated, coincident vertices merged, and unused vertices removed;
    degenerate and duplicate faces are removed (two faces with the same three corners are
    duplicates regardless of their winding). The scale is kept.

    Args:
        path: the file; joined headers, comments, blank lines, CRLF, colour columns and the
            COFF, NOFF and STOFF variants are supported, as are files without extra columns whose
            vertices and faces do not each have a line of their own.

    Raises:
        ValueError: the file is of another format, or damaged.
    """
    # Only comments can contain characters other than ASCII, and comments are dropped.
    text = Path(path).read_bytes().decode("utf-8-sig", errors="replace")
    text = _COMMENT.sub("", text).strip()
    header = _HEADER.match(text)
    if header is None:
        begin = repr(text[:20].splitlines()[0]) if text else "nothing"
        raise ValueError(f"it is not an OFF file of 3D points: it begins with {begin}")
    rows = [words for words in map(str.split, text[header.end() :].splitlines()) if words]
    try:
        mesh = _parsed(rows)
    except ValueError:
        if len(header.group()) > len("OFF"):  # vertices have an unknown number of columns
            raise
        mesh = _parsed(_regrouped(rows))
    if len(mesh.faces):
        extent = float(np.ptp(mesh.vertices, axis=0).max())
        # Relative to the extent: trimesh's own tolerance is absolute, and would collapse a
        # small model in metres or miss duplicates of a large one in millimetres.
        mesh.merge_vertices(digits_vertex=_decimals(mesh.vertices))
        solid_F = mesh.area_faces > _DEGENERATE_SHARE * extent * extent
        mesh.update_faces(solid_F & mesh.unique_faces())
        mesh.remove_unreferenced_vertices()
    return mesh


def _parsed(rows: list[list[str]]) -> trimesh.Trimesh:
    """Builds a mesh from the words of each line, the counts first; quads' triangles come last."""
    if not rows or len(rows[0]) < 2:
        raise ValueError("its header lacks the numbers of vertices and faces")
    num_vertices, num_faces = map(int, rows[0][:2])
    if num_vertices < 1 or num_faces < 1 or 1 + num_vertices + num_faces > len(rows):
        raise ValueError(
            f"it is truncated or empty: its header has {num_vertices} vertices and {num_faces} "
            f"faces, but {len(rows) - 1} lines follow"
        )
    vertices_V3 = np.array([words[:3] for words in rows[1 : 1 + num_vertices]], np.float64)
    vertices_V3 = vertices_V3.reshape(num_vertices, 3)
    corners, counts = list[str](), list[int]()
    for number, (count, *words) in enumerate(rows[1 + num_vertices : 1 + num_vertices + num_faces]):
        counts.append(int(count))
        if not len(words) >= counts[-1] > 0:
            raise ValueError(f"face {number} should have {count} corners, but has {len(words)}")
        corners += words[: counts[-1]]
    if not np.abs(vertices_V3).max() <= MAX_COORDINATE:
        raise ValueError(f"coordinates are not finite, or larger than {MAX_COORDINATE:g}")
    faces_F3, kinds_F = triangulate(vertices_V3, np.array(corners, np.int64), counts)
    faces_F3 = faces_F3[np.argsort(kinds_F % 3, kind="stable")]
    return trimesh.Trimesh(vertices_V3, faces_F3, process=False)


def _regrouped(rows: list[list[str]]) -> list[list[str]]:
    """Returns the counts and a row for each vertex and face, if lines are neither."""
    words = [word for row in rows for word in row]
    is_by_line = rows[1:] and all(len(row) == 3 or row[0] == str(len(row) - 1) for row in rows[1:])
    if is_by_line or len(words) < 4:
        return rows
    found, at = [words[:2]], 2 if len(rows[0]) == 2 else 3
    num_vertices, num_faces = map(int, words[:2])
    while at < len(words) and len(found) <= num_vertices + num_faces:
        end = at + (3 if len(found) <= num_vertices else 1 + max(int(words[at]), 0))
        found.append(words[at:end])
        at = end
    return found if at == len(words) else rows


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
