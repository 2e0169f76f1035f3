"""Reading OBJ files: meshes of polygons, and vertices without faces as clouds.

Shapes: V vertices, T triangles, Q points.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.formats.polygons import triangulate

_CONTINUED = re.compile(rb"\\\r?\n")


def read_obj(path: Path) -> NDArray[np.float64]:
    """Returns the triangles [T, 3, 3] of an OBJ file's faces, or else its vertices [Q, 3].

    Raises:
        ValueError: a line is invalid, or the file has free-form surfaces.
    """
    vertices, material = list[list[bytes]](), b""
    faces_of = dict[bytes, tuple[list[int], list[int]]]()  # corners and counts by material
    for line in _CONTINUED.sub(b" ", path.read_bytes().removeprefix(BOM_UTF8)).splitlines():
        keyword, *words = line.partition(b"#")[0].split() or [b""]
        if keyword == b"v":
            vertices.append(words[:3])
        elif keyword in (b"f", b"fo"):
            corners, counts = faces_of.setdefault(material, ([], []))
            numbers = [int(word.partition(b"/")[0]) for word in words]
            corners.extend(n + len(vertices) if n < 0 else n - 1 for n in numbers)
            counts.append(len(numbers))
        elif keyword == b"usemtl":
            material = b" ".join(words)
        elif keyword == b"surf":
            raise ValueError("it has free-form surfaces, which are not read")
    vertices_V3 = np.array(vertices, np.float64).reshape(len(vertices), 3)
    if not faces_of:
        return vertices_V3
    parts = list[NDArray[np.int64]]()
    # Sampling depends on this order, and on that of the triangles of quads.
    for corners, counts in reversed(faces_of.values()):
        triangles_T3, kinds_T = triangulate(vertices_V3, corners, counts)
        if len({*counts}) == 1:
            triangles_T3 = triangles_T3[kinds_T.argsort(kind="stable")]
        parts.append(triangles_T3)
    triangles_T33: NDArray[np.float64] = vertices_V3[np.concatenate(parts)]
    return triangles_T33
