"""Meshes and clouds in OBJ, PLY, STL and GLB files, read by trimesh.

Shapes: F faces, Q points of a cloud.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import trimesh
from numpy.typing import NDArray


def read_by_trimesh(path: Path) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of all meshes in a file, or points [Q, 3] if it has none.

    The file is read from memory and without a resolver, so that no other file is opened.
    """
    return scene_shape(
        trimesh.load_scene(
            io.BytesIO(path.read_bytes()),
            file_type=path.suffix[1:].lower(),
            process=False,
            resolver={},
            skip_materials=True,
        )
    )


def scene_shape(scene: trimesh.Scene) -> NDArray[np.float64]:
    """Triangles [F, 3, 3] of all meshes of a scene, or points [Q, 3] of its clouds."""
    if any(isinstance(part, trimesh.Trimesh) for part in scene.geometry.values()):
        triangles_F33: NDArray[np.float64] = scene.to_mesh().triangles
        return triangles_F33
    return np.concatenate([np.empty((0, 3)), *(part.vertices for part in scene.dump())])
