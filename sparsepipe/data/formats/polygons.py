"""Triangles of polygons, concave ones included.

Shapes: V vertices, C corners of all faces, F faces, T triangles of all faces, K corners of a face,
R corners that are left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_OVERLAP = 1e-6
"""Share of a face's area that a fan may cover falsely: corners on a line, rounded, are convex."""


def triangulate(
    vertices_V3: NDArray[np.float64], corners_C: ArrayLike, counts_F: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts faces into triangles [T, 3] of vertex numbers, in the order of the faces.

    A face becomes a fan around its first corner; if a triangle of the fan turns the other way than
    the face, ears are clipped in its mean plane. Faces of one or two corners have no triangles.

    Args:
        vertices_V3: coordinates.
        corners_C: vertex numbers of all faces' corners, one face after the other.
        counts_F: number of corners of each face.

    Returns:
        The triangles, and the kind [T] of each: 0 for a face of three corners, 1 and 2 for the
        first and the second half of a quad, 3 for a part of another face.

    Raises:
        ValueError: a corner is not the number of a vertex.
    """
    corners_C, counts_F = np.asarray(corners_C, np.int64), np.asarray(counts_F, np.int64)
    low, high, last = corners_C.min(initial=0), corners_C.max(initial=-1), len(vertices_V3) - 1
    if low < 0 or high > last:
        raise ValueError(f"faces use vertices {low} to {high}, not 0 to {last}")
    starts_F, parts_F = np.cumsum(counts_F) - counts_F, np.maximum(counts_F - 2, 0)
    ends_F = np.cumsum(parts_F)
    faces_T = np.repeat(np.arange(len(counts_F)), parts_F)
    number_T = np.arange(len(faces_T)) - (ends_F - parts_F)[faces_T]  # within the face
    fans_T3 = starts_F[faces_T, None] + number_T[:, None] * [0, 1, 1] + [0, 1, 2]
    kinds_T = np.select([counts_F[faces_T] == 3, counts_F[faces_T] == 4], [0, 1 + number_T], 3)
    fans_T3[kinds_T == 2] = np.roll(fans_T3[kinds_T == 2], -1, axis=1)  # 2, 3, 0 of a quad
    triangles_T3: NDArray[np.int64] = corners_C[fans_T3]
    first_T3, second_T3, third_T3 = vertices_V3[triangles_T3].transpose(1, 0, 2)
    normals_T3 = np.cross(second_T3 - first_T3, third_T3 - first_T3)
    normals_F3 = np.zeros((len(counts_F), 3))
    np.add.at(normals_F3, faces_T, normals_T3)
    sums_T3 = normals_F3[faces_T]
    leaves_T = (normals_T3 * sums_T3).sum(axis=1) < -_OVERLAP * (sums_T3**2).sum(axis=1)
    for face in np.unique(faces_T[leaves_T]):
        corners_K = corners_C[starts_F[face] : starts_F[face] + counts_F[face]]
        ears_N3 = _ears(vertices_V3[corners_K], normals_F3[face])
        triangles_T3[ends_F[face] - parts_F[face] : ends_F[face]] = corners_K[ears_N3]
    return triangles_T3, kinds_T


def _ears(points_K3: NDArray[np.float64], normal_3: NDArray[np.float64]) -> list[list[int]]:
    """Returns the triangles [K - 2, 3] of a polygon's corners, found by clipping ears."""
    axis = int(np.abs(normal_3).argmax())
    points_K2 = (points_K3 - points_K3[0])[:, [(1, 2), (2, 0), (0, 1)][axis]]
    if normal_3[axis] < 0:
        points_K2 = points_K2[:, ::-1]  # counterclockwise
    ring, triangles = list(range(len(points_K2))), list[list[int]]()
    at = misses = 0
    while len(ring) > 2:
        at %= len(ring)
        corners = [ring[at - 1], ring[at], ring[(at + 1) % len(ring)]]
        tries = misses // len(ring)  # above 0, the face touches itself; above 1, it crosses itself
        if tries > 1 or _is_ear(points_K2[corners], points_K2[ring], touching=tries > 0):
            triangles.append(corners)
            del ring[at]
            misses = 0
        else:
            at, misses = at + 1, misses + 1
    return triangles


def _is_ear(
    corners_32: NDArray[np.float64], points_R2: NDArray[np.float64], *, touching: bool
) -> bool:
    sides_32 = np.roll(corners_32, -1, axis=0) - corners_32
    turn = sides_32[0, 0] * sides_32[1, 1] - sides_32[0, 1] * sides_32[1, 0]
    if turn <= 0:
        return bool(turn == 0)  # a corner on a straight line, or the tip of a spike
    to_R32 = points_R2[:, None] - corners_32
    left_R3 = sides_32[:, 0] * to_R32[..., 1] - sides_32[:, 1] * to_R32[..., 0]
    within_R3 = left_R3 > 0 if touching else left_R3 >= 0
    # Twins of the triangle's own corners join a hole to the outline.
    within_R = within_R3.all(axis=1) & (to_R32 != 0).any(axis=2).all(axis=1)
    return not within_R.any()
