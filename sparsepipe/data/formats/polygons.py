"""Triangles of polygons, concave ones included.

Shapes: V vertices, C corners of all faces, F faces, P faces of K corners, N triangles of each of
them, T triangles in all, R corners that are left.
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
    starts_F = np.cumsum(counts_F) - counts_F
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int64))]
    for count in np.unique(counts_F[counts_F > 2]).tolist():
        faces_P = np.flatnonzero(counts_F == count)
        corners_PK = corners_C[starts_F[faces_P, None] + np.arange(count)]
        fan = [[0, n, n + 1] for n in range(1, count - 1)] if count != 4 else [[0, 1, 2], [2, 3, 0]]
        kinds = {3: [0], 4: [1, 2]}.get(count, [3] * len(fan))
        triangles_PN3 = corners_PK[:, fan]
        if count > 3:
            first_PN3, second_PN3, third_PN3 = vertices_V3[triangles_PN3].transpose(2, 0, 1, 3)
            normals_PN3 = np.cross(second_PN3 - first_PN3, third_PN3 - first_PN3)
            along_PN = np.einsum("pnx,pmx->pn", normals_PN3, normals_PN3)
            leaves_P = (along_PN < -_OVERLAP * along_PN.sum(axis=1, keepdims=True)).any(axis=1)
            if count == 4:  # the other diagonal, for all at once
                triangles_PN3[leaves_P] = corners_PK[leaves_P][:, [[1, 2, 3], [3, 0, 1]]]
                leaves_P[:] = False
            for row in np.flatnonzero(leaves_P):
                ears_N3 = _ears(vertices_V3[corners_PK[row]], normals_PN3[row].sum(axis=0))
                triangles_PN3[row] = corners_PK[row, ears_N3]
        ids = np.repeat(faces_P, len(fan)), np.tile(kinds, len(faces_P))
        parts.append((*ids, triangles_PN3.reshape(-1, 3)))
    faces_T, kinds_T, triangles_T3 = map(np.concatenate, zip(*parts, strict=True))
    order_T = faces_T.argsort(kind="stable")
    return triangles_T3[order_T], kinds_T[order_T]


def _ears(points_K3: NDArray[np.float64], normal_3: NDArray[np.float64]) -> list[list[int]]:
    """Returns the triangles [K - 2, 3] of a polygon's corners, found by clipping ears.

    An ear is a corner whose triangle has no other corner in it. Where a face crosses or touches
    itself and has no ear, corners on the triangle's sides are allowed, and at last any corner.
    """
    axis = int(np.abs(normal_3).argmax())
    points_K2 = (points_K3 - points_K3[0])[:, [(1, 2), (2, 0), (0, 1)][axis]]
    if normal_3[axis] < 0:
        points_K2 = points_K2[:, ::-1]  # counterclockwise
    ring, triangles = list(range(len(points_K2))), list[list[int]]()
    at = misses = 0
    while len(ring) > 2:
        at %= len(ring)
        corners = [ring[at - 1], ring[at], ring[(at + 1) % len(ring)]]
        tries = misses // len(ring)
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
