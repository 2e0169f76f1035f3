"""OFF meshes in and out, by way of trimesh, for files as they are found in the wild.

ModelNet's files fuse the header with the counts (``OFF490 518 0``), double faces and
carry degenerate ones; other collections add comments, polygons and colour columns. What
can be read is read; what is broken is refused with the file, the fault and a remedy.

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
"""Raised with any change that reads a file as other triangles; caches depend on it."""

# The format's optional prefixes: ST (texture), C (colour), N (normal) add columns behind
# the three coordinates, which the loader ignores. "4" and "n" change the coordinates
# themselves and are refused.
_HEADER = re.compile(r"(?:ST)?C?N?OFF", re.IGNORECASE)
_COMMENT = re.compile(r"#[^\r\n]*")
_LARGEST_LOADED = 4
"""Corners of the largest faces that the loader triangulates."""
_DEGENERATE_SHARE = 1e-14
"""Faces smaller than this share of the squared extent are rounding, not surface."""
_LARGEST_COORDINATE = 1e30
"""Beyond, squares overflow, in single precision sooner than in double."""
_LARGEST_DECIMALS = 17
"""Of the largest coordinate: vertices are compared as 64-bit integers."""
_SIGNIFICANT_DIGITS = 8
"""Decimals relative to the extent: kept when writing, compared when merging vertices."""


def read_off(path: str | os.PathLike[str]) -> trimesh.Trimesh:
    """Read an OFF file as a triangle mesh fit for sampling by area.

    Polygons are triangulated (as fans beyond quads), vertices in the same place are merged,
    unused ones dropped, degenerate and duplicate faces removed (two faces on the same three
    corners are duplicates whatever their winding). The scale is kept.

    Args:
        path: the file; fused header, comments, blank lines, CRLF, colour columns and the
            COFF, NOFF and STOFF variants are resolve_run.

    Raises:
        DataError: the file is missing, empty, no OFF file, truncated, has vertices that
            are not finite or faces that point at none, or has no face of positive area.
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
        raise _broken(path, fault) from error
    if not np.isfinite(mesh.vertices).all():
        bad = int(np.flatnonzero(~np.isfinite(mesh.vertices).all(axis=1))[0])
        raise _broken(path, f"vertex {bad} is not finite (NaN or infinite)")
    return _clean(path, mesh)


def write_off(mesh: trimesh.Trimesh, path: str | os.PathLike[str]) -> None:
    """Write ``mesh`` as an OFF file, which appears whole or not at all; its folder is made.

    Coordinates keep 8 decimal digits relative to the mesh's extent.

    Raises:
        DataError: the file cannot be written (disk full, no permission).
    """
    path = Path(path)
    try:
        save_off(mesh, path)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}",
            remedy="Free space or grant write permission there, or choose another folder.",
        ) from error


def save_off(mesh: trimesh.Trimesh, path: Path) -> None:
    """What ``write_off`` does, for callers that explain an ``OSError`` themselves."""
    text = mesh.export(file_type="off", digits=max(_decimals(mesh.vertices), 0))
    # Thousands are written at once: waiting for the disk after each would take minutes.
    with replacing(path, durable=False) as temporary:
        temporary.write_text(text, encoding="ascii")


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UnreadableError(
            f"{path} does not exist", remedy="Check the path and the data set's root."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    # Only comments can hold other characters than ASCII, and those are dropped.
    text = _COMMENT.sub("", raw.decode("utf-8-sig", errors="replace")).strip()
    if not text:
        raise _broken(path, "the file is empty")
    return text


def _split(path: Path, text: str) -> tuple[list[str], int]:
    """Lines of the vertices, then of the faces; how many are vertices."""
    header = _HEADER.match(text)
    if header is None:
        raise DataError(
            f"{path} is not an OFF file of three-dimensional points: "
            f"it begins with {text[:20].splitlines()[0]!r}",
            remedy="Convert it to a text OFF file, or remove it from the data set.",
        )
    lines = [line for line in map(str.strip, text[header.end() :].splitlines()) if line]
    counts = lines[0].split() if lines else []
    if len(counts) < 2 or not all(count.isdecimal() for count in counts[:2]):
        found = repr(lines[0][:40]) if lines else "nothing"
        raise _broken(path, f"the header names no vertex and face counts, found {found}")
    num_vertices, num_faces = int(counts[0]), int(counts[1])
    if num_vertices == 0 or num_faces == 0:
        what = "vertices" if num_vertices == 0 else "faces"
        raise _broken(path, f"the mesh has no {what}")
    missing = 1 + num_vertices + num_faces - len(lines)
    if missing > 0:
        raise _broken(
            path,
            f"truncated: the header promises {num_vertices} vertices and {num_faces} faces, "
            f"{missing} of their lines are missing",
        )
    return lines[1 : 1 + num_vertices + num_faces], num_vertices


def _without_polygons(face_lines: list[str]) -> list[str]:
    """The faces, those with more than four corners as fans of triangles.

    The loader's own fans fail on text, and it takes a face that lacks corners for a smaller
    one.

    Raises:
        ValueError: a face has no corners, or fewer than it says.
    """
    lines = []
    for line in face_lines:
        words = line.split()
        corners = int(words[0])
        if not 1 <= corners < len(words):
            raise ValueError("a face lacks corners")
        if corners <= _LARGEST_LOADED:
            lines.append(line)
        else:
            lines += [f"3 {words[1]} {words[i]} {words[i + 1]}" for i in range(2, corners)]
    return lines


def _first_fault(vertex_lines: list[str], face_lines: list[str]) -> str | None:
    """Name the first line that is no vertex or no face; None if all are."""
    for number, line in enumerate(vertex_lines):
        if not _are(float, line.split()[:3], count=3):
            return f"vertex {number} is not three numbers: {line[:60]!r}"
    for number, line in enumerate(face_lines):
        count, *corners = line.split()
        if not _is_count(count) or not _are(int, corners[: int(count)], count=int(count)):
            return f"face {number} is not a count and as many corners: {line[:60]!r}"
        for corner in map(int, corners[: int(count)]):
            if not 0 <= corner < len(vertex_lines):
                return f"face {number} points at vertex {corner} of {len(vertex_lines)}"
    return None


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _are(kind: type[float] | type[int], words: Sequence[str], *, count: int) -> bool:
    try:
        return len([kind(word) for word in words]) == count
    except ValueError:
        return False


def _clean(path: Path, mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    if len(mesh.faces):
        farthest = float(np.abs(mesh.vertices).max())
        if farthest > _LARGEST_COORDINATE:
            raise _broken(
                path, f"coordinates reach {farthest:.3g}, more than {_LARGEST_COORDINATE:g}"
            )
        extent = float(np.ptp(mesh.vertices, axis=0).max())
        # Relative to the extent: the library's own tolerance is absolute, and would
        # collapse a small model in metres or miss doubles of a large one in millimetres.
        mesh.merge_vertices(digits_vertex=_decimals(mesh.vertices))
        solid_F = mesh.area_faces > _DEGENERATE_SHARE * extent * extent
        mesh.update_faces(solid_F & mesh.unique_faces())
        mesh.remove_unreferenced_vertices()
    if not len(mesh.faces) or not mesh.area > 0:
        raise _broken(path, "the mesh has zero area: every face is degenerate")
    return mesh


def _decimals(vertices_V3: np.ndarray) -> int:
    extent = float(np.ptp(vertices_V3, axis=0).max()) if len(vertices_V3) else 0.0
    if not 0 < extent < np.inf:
        return _SIGNIFICANT_DIGITS
    # Far from the origin, doubles themselves have fewer decimals.
    farthest = float(np.abs(vertices_V3).max())
    return min(
        _SIGNIFICANT_DIGITS - int(np.ceil(np.log10(extent))),
        _LARGEST_DECIMALS - int(np.ceil(np.log10(farthest))),
    )


def _broken(path: Path, fault: str) -> DataError:
    return DataError(
        f"{path}: {fault}",
        remedy="Restore the file from its source, or remove it from the data set.",
    )
