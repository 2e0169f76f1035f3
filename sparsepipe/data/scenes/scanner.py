"""Simulated scans: what a laser scanner on a tripod returns from coloured triangles.

A station sends rays in equal steps of azimuth and elevation. Each returns from the nearest triangle
that it meets, so points are denser near the station, and nothing is seen behind anything else.

Shapes: T triangles, A azimuths, E elevations, R = E * A rays of a station, H pairs of a ray and a
triangle that it may meet, P points.
"""

from __future__ import annotations

import math

import numpy as np

from sparsepipe.data.points import ExactArray, FloatArray, IntArray

_LOWEST, _HIGHEST = math.radians(-65), math.radians(80)
"""Range of elevations: the tripod hides what is below."""


def scan(
    corners_T33: ExactArray,
    looks_T7: ExactArray,
    station_3: ExactArray,
    rng: np.random.Generator,
    *,
    lamp_3: ExactArray,
    step_deg: float,
) -> tuple[IntArray, dict[str, FloatArray]]:
    """Returns the triangle of each point [P], and ``coord``, ``color`` and ``normal`` [P, 3].

    Ranges, colours and normals are noisy, and rays that graze a surface return less often. Normals
    point to the scanner at ``station_3``. ``looks_T7``: colours from 0 to 1; wave vectors of
    stripes, in radians per metre; and the share of the rays that return, which is low for glass.
    ``lamp_3``: place of the light; ``step_deg``: angle between neighbouring rays, in degrees.
    """
    step = 2 * math.pi / round(360 / step_deg)
    azimuth_A = np.arange(round(360 / step_deg), dtype=np.float64) * step + float(
        rng.uniform(0, step)
    )
    elevation_E = np.arange(_LOWEST, _HIGHEST, step)
    around_R, up_R = (each.ravel() for each in np.meshgrid(azimuth_A, elevation_E))
    across_R = np.cos(up_R)
    rays_R3 = np.stack([across_R * np.cos(around_R), across_R * np.sin(around_R), np.sin(up_R)], 1)
    corners_T33 = corners_T33 - station_3
    range_R, triangle_R = cast_rays(corners_T33, rays_R3, azimuth_A, elevation_E)

    a_T3, b_T3, c_T3 = corners_T33.transpose(1, 0, 2)
    normals_R3 = np.cross(b_T3 - a_T3, c_T3 - a_T3)[triangle_R]
    normals_R3 /= np.maximum(np.linalg.norm(normals_R3, axis=1, keepdims=True), 1e-12)
    slant_R = -np.einsum("ri,ri->r", rays_R3, normals_R3)
    chance_R = looks_T7[triangle_R, 6] * np.minimum(abs(slant_R) * 8, 1)
    seen_P = np.flatnonzero(np.isfinite(range_R) & (rng.random(len(range_R)) < chance_R))
    range_P, triangle_P = range_R[seen_P], triangle_R[seen_P]
    # At an edge, light may return from two surfaces at once, as if from between them.
    gap_P = np.roll(range_P, 1) - range_P
    mixed_P = (abs(gap_P) > 0.08) & (rng.random(len(gap_P)) < 0.1)
    range_P += gap_P * mixed_P * rng.uniform(0, 0.5, len(gap_P))
    range_P += rng.normal(size=len(gap_P)) * (0.002 + 0.0008 * range_P)

    points_P3 = station_3 + rays_R3[seen_P] * range_P[:, None]
    normals_P3 = normals_R3[seen_P] * np.sign(slant_R[seen_P])[:, None]
    light_P3 = lamp_3 - points_P3
    light_P = np.einsum("pi,pi->p", light_P3, normals_P3) / np.linalg.norm(light_P3, axis=1)
    stripes_P = np.sin(np.einsum("pi,pi->p", points_P3, looks_T7[triangle_P, 3:6]))
    shade_P = (0.6 + 0.4 * np.maximum(light_P, 0)) * (1 + 0.08 * stripes_P)
    colors_P3 = looks_T7[triangle_P, :3] * shade_P[:, None] * rng.uniform(0.85, 1.1)
    normals_P3 += rng.normal(0, 0.06, points_P3.shape)
    normals_P3 /= np.linalg.norm(normals_P3, axis=1, keepdims=True)
    colors_P3 = np.clip(colors_P3 + rng.normal(0, 0.02, points_P3.shape), 0, 1)
    columns = {"coord": points_P3, "color": colors_P3, "normal": normals_P3}
    return triangle_P, {name: values.astype(np.float32) for name, values in columns.items()}


def cast_rays(
    corners_T33: ExactArray, rays_R3: ExactArray, azimuth_A: ExactArray, elevation_E: ExactArray
) -> tuple[ExactArray, IntArray]:
    """Returns the distance along each ray to the nearest triangle, or infinity, and the triangle.

    Only rays within a triangle's range of azimuth and elevation are tried. A ray r meets a triangle
    a, b, c if r.(b x c), r.(c x a) and r.(a x b) have one sign, at a.(b x c) over their sum.
    """
    step, (x_T3, y_T3, z_T3) = azimuth_A[1] - azimuth_A[0], np.moveaxis(corners_T33, 2, 0)
    start_T3, slope_T3 = np.arctan2(y_T3, x_T3) - azimuth_A[0], z_T3 / np.hypot(x_T3, y_T3)
    turn_T3 = (start_T3 - start_T3[:, :1] + np.pi) % (2 * np.pi) - np.pi
    left_T, right_T = turn_T3.min(axis=1), turn_T3.max(axis=1)
    # An edge rises above its ends: the tangent of its elevation is a cosine of the azimuth. A
    # triangle right above or below the station covers all azimuths.
    bulge_T = 1 / np.maximum(np.cos((right_T - left_T) / 2), 1e-12)
    bottom_T, top_T = slope_T3.min(axis=1), slope_T3.max(axis=1)
    bottom_T *= np.where(bottom_T < 0, bulge_T, 1)
    top_T *= np.where(top_T > 0, bulge_T, 1)
    is_around_T = right_T - left_T >= np.pi
    left_T[is_around_T], right_T[is_around_T] = 0, 2 * np.pi

    column_T = np.ceil((start_T3[:, 0] + left_T) / step).astype(np.int64)
    width_T = np.floor((start_T3[:, 0] + right_T) / step).astype(np.int64) + 1 - column_T
    row_T = np.searchsorted(elevation_E, np.arctan(bottom_T))
    count_T = (np.searchsorted(elevation_E, np.arctan(top_T), side="right") - row_T) * width_T
    triangle_H = np.repeat(np.arange(len(count_T)), count_T)
    place_H = np.arange(len(triangle_H)) - np.repeat(np.cumsum(count_T) - count_T, count_T)
    row_H, column_H = np.divmod(place_H, width_T[triangle_H])
    column_H = (column_H + column_T[triangle_H]) % len(azimuth_A)
    ray_H = (row_H + row_T[triangle_H]) * len(azimuth_A) + column_H

    a_T3, b_T3, c_T3 = corners_T33.transpose(1, 0, 2)
    sides_T33 = np.stack([np.cross(b_T3, c_T3), np.cross(c_T3, a_T3), np.cross(a_T3, b_T3)], axis=1)
    volume_T = np.einsum("ti,ti->t", a_T3, sides_T33[:, 0])
    weights_H3 = np.einsum("hij,hj->hi", sides_T33[triangle_H], rays_R3[ray_H])
    met = np.flatnonzero((weights_H3 > 0).all(axis=1) | (weights_H3 < 0).all(axis=1))
    triangle_H, ray_H = triangle_H[met], ray_H[met]
    range_H = volume_T[triangle_H] / weights_H3[met].sum(axis=1)
    range_H[range_H <= 0] = np.inf
    range_R, triangle_R = np.full(len(rays_R3), np.inf), np.zeros(len(rays_R3), np.int64)
    np.minimum.at(range_R, ray_H, range_H)
    nearest = range_H == range_R[ray_H]
    triangle_R[ray_H[nearest]] = triangle_H[nearest]
    return range_R, triangle_R
