"""Solids from which procedural shapes are built, with z up.

Parts overlap and are not united: sampling by area needs no closed surface, and so no boolean
operations. A length of 1 is about the size of an object.

Shapes: P points of an outline or path, S sections of a loft, V vertices, F faces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import trimesh

Array: TypeAlias = npt.NDArray[np.floating]
Faces: TypeAlias = npt.NDArray[np.int64]
Point: TypeAlias = Sequence[float] | Array


class Part(NamedTuple):
    """Triangles of a solid, in plain arrays: making mesh objects would take most of the time."""

    vertices_V3: Array
    faces_F3: Faces


def join(parts: Sequence[Part]) -> trimesh.Trimesh:
    """Joins all parts into one mesh."""
    starts = np.cumsum([0, *(len(part.vertices_V3) for part in parts)])
    faces = [part.faces_F3 + start for part, start in zip(parts, starts, strict=False)]
    vertices = np.vstack([part.vertices_V3 for part in parts])
    return trimesh.Trimesh(vertices, np.vstack(faces), process=False)


def moved(part: Part, offset: Point) -> Part:
    """The part, shifted by ``offset``."""
    return Part(part.vertices_V3 + np.asarray(offset), part.faces_F3)


def turned(part: Part, angle: float, axis: str = "z") -> Part:
    """The part, rotated by ``angle`` radians around an axis through the origin."""
    first, second = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    cosine, sine = np.cos(angle), np.sin(angle)
    vertices = part.vertices_V3.copy()
    vertices[:, first] = cosine * part.vertices_V3[:, first] - sine * part.vertices_V3[:, second]
    vertices[:, second] = sine * part.vertices_V3[:, first] + cosine * part.vertices_V3[:, second]
    return Part(vertices, part.faces_F3)


def box(low: Point, high: Point) -> Part:
    """A box from corner ``low`` to corner ``high``."""
    unit = _unit("box")
    low_3, high_3 = np.asarray(low), np.asarray(high)
    return Part((low_3 + high_3) / 2 + unit.vertices_V3 * (high_3 - low_3), unit.faces_F3)


def ball(centre: Point, radii: Point) -> Part:
    """An ellipsoid with half axes ``radii`` along x, y and z."""
    unit = _unit("ball")
    return Part(unit.vertices_V3 * np.asarray(radii) + np.asarray(centre), unit.faces_F3)


def rod(start: Point, end: Point, radius: float, *, sections: int = 10) -> Part:
    """A round bar between two points; its cross-section is a polygon of ``sections`` sides."""
    unit = _unit("rod", sections)
    start_3, end_3 = np.asarray(start, dtype=float), np.asarray(end, dtype=float)
    along_3 = end_3 - start_3
    # Any direction not parallel to the bar spans the plane across it.
    helper_3 = np.array([0.0, 1.0, 0.0] if abs(along_3[2]) > abs(along_3[1]) else [0.0, 0.0, 1.0])
    across_3 = _cross(along_3, helper_3)
    across_3 *= radius / np.sqrt(across_3 @ across_3)
    upright_3 = _cross(along_3, across_3)
    upright_3 *= radius / np.sqrt(upright_3 @ upright_3)
    vertices = unit.vertices_V3 @ np.array([across_3, upright_3, along_3])
    return Part(vertices + (start_3 + end_3) / 2, unit.faces_F3)


def disc(radius: float, low: float, high: float) -> Part:
    """An upright cylinder around the z axis, from height ``low`` to ``high``."""
    return rod((0, 0, low), (0, 0, high), radius, sections=24)


def lathe(profile: Sequence[tuple[float, float]], *, sections: int = 24) -> Part:
    """The surface swept by a profile of (radius, height) points around the z axis."""
    angle = circle_angles(sections)
    radius_S, height_S = np.array(profile, dtype=float).T
    rings_SP3 = np.empty((len(profile), sections, 3))
    rings_SP3[:, :, 0] = np.outer(radius_S, np.cos(angle))
    rings_SP3[:, :, 1] = np.outer(radius_S, np.sin(angle))
    rings_SP3[:, :, 2] = height_S[:, None]
    return Part(rings_SP3.reshape(-1, 3), _quads(len(profile), sections))


def skin(rings_SP3: Sequence[Array] | Array) -> Part:
    """A surface of quads between consecutive closed rings of points, with fans as end caps."""
    num_rings, num_points = len(rings_SP3), len(rings_SP3[0])
    centres = [rings_SP3[0].mean(axis=0), rings_SP3[-1].mean(axis=0)]
    corner = np.arange(num_points)
    following, last = np.roll(corner, -1), (num_rings - 1) * num_points
    # The centres are stored after the rings.
    centre = np.full(num_points, num_rings * num_points)
    first_fan = np.column_stack([centre, following, corner])
    last_fan = np.column_stack([centre + 1, last + corner, last + following])
    faces = np.vstack([_quads(num_rings, num_points), first_fan, last_fan])
    return Part(np.vstack([*rings_SP3, *centres]), faces)


def loft(outlines_SP2: Sequence[Array], heights_S: Sequence[float]) -> Part:
    """The skin through outlines at given heights; the first and the last must be star-shaped."""
    num_points = len(outlines_SP2[0])
    rings = [
        np.column_stack([outline_P2, np.full(num_points, height)])
        for outline_P2, height in zip(outlines_SP2, heights_S, strict=True)
    ]
    return skin(rings)


def prism(outline_P2: Array, low: float, high: float) -> Part:
    """An outline, star-shaped around its mean point, extruded from ``low`` to ``high``."""
    return loft([outline_P2, outline_P2], [low, high])


def tube(path_P3: Array, radius: float, *, sections: int = 8) -> Part:
    """A round bar of a given radius along a path in the x-z plane."""
    tangent_P3 = np.gradient(path_P3, axis=0)
    tangent_P3 /= np.linalg.norm(tangent_P3, axis=1, keepdims=True)
    across_P3 = tangent_P3[:, [2, 1, 0]] * [-1, 0, 1]
    angle = circle_angles(sections)
    rings_SP3 = path_P3[:, None] + radius * np.cos(angle)[:, None] * across_P3[:, None]
    rings_SP3[:, :, 1] += radius * np.sin(angle)
    return skin(rings_SP3)


def circle_angles(num_points: int) -> Array:
    """Angles in radians of ``num_points`` equal steps around the circle, from 0."""
    return np.arange(num_points) * (2 * np.pi / num_points)


def around(number: int, *, start: float = 0.0) -> list[tuple[float, float]]:
    """(cosine, sine) of ``number`` evenly spaced angles about z, the first of ``start`` radians."""
    angles = circle_angles(number) + start
    return list(zip(np.cos(angles).tolist(), np.sin(angles).tolist(), strict=True))


def superellipse(
    radius_x: float, radius_y: float, *, power: float = 2.0, points: int = 28
) -> Array:
    """Outline [P, 2]: an ellipse at power 2, nearly a rectangle from power 6."""
    angle = circle_angles(points)
    cosine, sine = np.cos(angle), np.sin(angle)
    x = radius_x * np.sign(cosine) * np.abs(cosine) ** (2 / power)
    y = radius_y * np.sign(sine) * np.abs(sine) ** (2 / power)
    return np.column_stack([x, y])


@cache
def _unit(kind: str, sections: int = 0) -> Part:
    """A cube of side 1, a ball of radius 1, or a rod of radius and length 1, around the origin."""
    if kind == "box":
        mesh = trimesh.creation.box()
    elif kind == "ball":
        mesh = trimesh.creation.icosphere(subdivisions=2)
    else:
        mesh = trimesh.creation.cylinder(radius=1.0, height=1.0, sections=sections)
    return Part(np.array(mesh.vertices), np.array(mesh.faces))


@cache
def _quads(num_rings: int, num_points: int) -> Faces:
    """Returns two triangles for every quad between consecutive rings of vertices."""
    corner = np.arange((num_rings - 1) * num_points).reshape(num_rings - 1, num_points)
    following = np.roll(corner, -1, axis=1)
    lower = np.stack([corner, following, following + num_points], axis=-1)
    upper = np.stack([corner, following + num_points, corner + num_points], axis=-1)
    return np.concatenate([lower.reshape(-1, 3), upper.reshape(-1, 3)])


def _cross(a: Array, b: Array) -> Array:
    # np.cross is made for stacks of vectors and takes ten times longer for one.
    return np.array(
        [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]
    )


def chance(rng: np.random.Generator, probability: float) -> bool:
    """True with the given probability."""
    return bool(rng.random() < probability)


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """A uniform draw from [low, high)."""
    return low + (high - low) * float(rng.random())


def count(rng: np.random.Generator, low: int, high: int) -> int:
    """A random whole number from ``low`` to ``high``, both included."""
    return int(rng.integers(low, high + 1))


def things(
    rng: np.random.Generator, half_x: float, half_y: float, low: float, *, most: int = 3
) -> list[Part]:
    """Zero to ``most`` boxes, cans or balls on a surface of these half widths at height ``low``."""
    parts = []
    for _ in range(count(rng, 0, most)):
        radius, height = between(rng, 0.08, 0.35) * half_y, between(rng, 0.05, 0.6)
        x, y = between(rng, -0.8, 0.8) * half_x, between(rng, -0.7, 0.7) * half_y
        kind = ("box", "can", "ball")[count(rng, 0, 2)]
        if kind == "box":
            wide = radius * between(rng, 0.7, 2.0)
            parts.append(box((x - wide, y - radius, low), (x + wide, y + radius, low + height)))
        elif kind == "can":
            parts.append(rod((x, y, low), (x, y, low + height), radius, sections=16))
        else:
            parts.append(ball((x, y, low + radius), (radius, radius, radius)))
    return parts
