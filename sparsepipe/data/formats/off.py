"""Reading and writing OFF meshes, including irregular files.

ModelNet's files join the header and the counts (``OFF490 518 0``) and contain duplicate and
degenerate faces; other collections have comments, polygons and colour columns. Such files are
read. Shapes: V vertices, F faces.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import trimesh

from sparsepipe.data.files import check_regular
from sparsepipe.errors import DataError
from sparsepipe.utils.files import replacing

READER_VERSION = 1
"""Increased with any change to the triangles read from a file; caches depend on it."""

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
            COFF, NOFF and STOFF variants are supported.
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
        mesh = _parsed(rows)
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


def _parsed(rows: list[list[str]]) -> trimesh.Trimesh:
    """Builds a mesh from the words of each line, the counts first; quads' triangles come last."""
    if not rows or len(rows[0]) < 2:
        raise ValueError("its header lacks the numbers of vertices and faces")
    num_vertices, num_faces = map(int, rows[0][:2])
    if num_vertices < 1 or num_faces < 1 or 1 + num_vertices + num_faces > len(rows):
        raise ValueError(
            "it is truncated or empty: the numbers of vertices and faces in its header are "
            f"{num_vertices} and {num_faces}, but that of the lines below is {len(rows) - 1}"
        )
    vertices_V3 = np.array([words[:3] for words in rows[1 : 1 + num_vertices]], np.float64)
    vertices_V3 = vertices_V3.reshape(num_vertices, 3)
    triangles, quads = list[list[str]](), list[list[str]]()
    for number, (count, *words) in enumerate(rows[1 + num_vertices : 1 + num_vertices + num_faces]):
        corners = words[: int(count)]
        if not len(corners) == int(count) > 0:
            raise ValueError(
                f"face {number} should be a count of corners, at least 1, and that many vertex "
                f"numbers; its count is {count}, and {len(words)} values follow"
            )
        if len(corners) == 4:
            quads.append(corners)
        else:
            triangles += [[corners[0], *pair] for pair in pairwise(corners[1:])]
    faces_F3 = np.array(triangles, np.int64).reshape(-1, 3)
    quads_Q4 = np.array(quads, np.int64).reshape(-1, 4)
    faces_F3 = np.concatenate([faces_F3, quads_Q4[:, [0, 1, 2]], quads_Q4[:, [2, 3, 0]]])
    if not np.abs(vertices_V3).max() <= _MAX_COORDINATE:
        raise ValueError(f"coordinates are not finite, or larger than {_MAX_COORDINATE:g}")
    if faces_F3.size and not (faces_F3.min() >= 0 and faces_F3.max() < num_vertices):
        raise ValueError(
            f"faces use vertices {faces_F3.min()} to {faces_F3.max()}, not 0 to {num_vertices - 1}"
        )
    return trimesh.Trimesh(vertices_V3, faces_F3, process=False)


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
