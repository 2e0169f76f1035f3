"""Vessels, round machine elements, airplanes and guitars."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from sparsepipe.data.shapes.solids import (
    Array,
    Part,
    around,
    ball,
    between,
    box,
    chance,
    circle_angles,
    count,
    lathe,
    moved,
    prism,
    rod,
    skin,
    superellipse,
    tube,
    turned,
)

Profile: TypeAlias = list[tuple[float, float]]
"""(radius, height) of points from bottom to top."""


def vase(rng: np.random.Generator) -> list[Part]:
    """A vessel without handles."""
    return _vessel(rng, _body(rng))


def mug(rng: np.random.Generator) -> list[Part]:
    """A vessel with one handle."""
    profile = _body(rng)
    return [*_vessel(rng, profile), _handle(rng, profile)]


def urn(rng: np.random.Generator) -> list[Part]:
    """A vessel with two handles."""
    profile = _body(rng)
    handle = _handle(rng, profile)
    return [*_vessel(rng, profile), handle, turned(handle, np.pi)]


def jug(rng: np.random.Generator) -> list[Part]:
    """A vessel with one handle and, opposite it, a spout."""
    profile = _body(rng)
    parts = [*_vessel(rng, profile), _handle(rng, profile)]
    # The spout leaves the body on the side of negative x and rises.
    height = profile[-1][1]
    low = between(rng, 0.3, 0.6) * height
    start, reach = _radius_at(profile, low), between(rng, 0.18, 0.36)
    angle = np.linspace(0.15, np.pi / 2 + 0.4, 7)
    path = np.zeros((7, 3))
    path[:, 0] = -start - reach + reach * np.cos(angle)
    path[:, 2] = low + (height * 1.02 - low) * np.sin(angle)
    return [*parts, tube(path, between(rng, 0.08, 0.12))]


def _body(rng: np.random.Generator) -> Profile:
    """Draws a vessel's outer profile: a cylinder, a cone, a belly, a waist or a tulip."""
    height = between(rng, 0.5, 1.2)
    foot_middle_neck_rim = (
        (0.4, 0.4, 0.4, 0.4),
        (0.28, 0.36, 0.43, 0.46),
        (0.28, 0.45, 0.3, 0.32),
        (0.4, 0.3, 0.32, 0.42),
        (0.22, 0.42, 0.4, 0.46),
    )[count(rng, 0, 4)]
    knots = np.array(foot_middle_neck_rim) * rng.uniform(0.85, 1.15, 4)
    share = np.linspace(0, 1, 9)
    radii = np.interp(share, [0, between(rng, 0.35, 0.5), between(rng, 0.7, 0.85), 1], knots)
    radii[1:-1] = (radii[:-2] + 2 * radii[1:-1] + radii[2:]) / 4
    return [(float(r), float(z)) for r, z in zip(radii, share * height, strict=True)]


def _vessel(rng: np.random.Generator, profile: Profile) -> list[Part]:
    """A vessel with this outer profile and an inner wall; sometimes with a lid, saucer or tray."""
    wall = between(rng, 0.02, 0.05)
    inside = [(max(r - wall, wall / 2), max(z, wall)) for r, z in reversed(profile)]
    parts = [lathe([(0.0, 0.0), *profile, *inside, (0.0, wall)])]
    if chance(rng, 0.25):
        radius, height = profile[-1]
        rise, knob = between(rng, 0.05, 0.15), between(rng, 0.05, 0.09)
        cover = lathe([(radius, height), (radius * 0.7, height + rise * 0.7), (0.0, height + rise)])
        parts += [cover, ball((0, 0, height + rise + knob * 0.7), (knob, knob, knob))]
    if chance(rng, 0.4):
        half_x, half_y = rng.uniform(0.4, 0.75, 2)
        if chance(rng, 0.5):
            half_y = half_x
        outline = superellipse(half_x, half_y, power=2.0 if half_x == half_y else 8.0)
        tray = prism(outline, -between(rng, 0.03, 0.08), 0.0)
        parts.append(moved(tray, (*rng.uniform(-0.15, 0.15, 2), 0.0)))
    return parts


def _radius_at(profile: Profile, height: float) -> float:
    radii, heights = np.array(profile).T
    return float(np.interp(height, heights, radii))


def _handle(rng: np.random.Generator, profile: Profile) -> Part:
    """A curved handle that joins a low and a high point of the vessel, on its +x side."""
    height = profile[-1][1]
    low, high = between(rng, 0.15, 0.35) * height, between(rng, 0.7, 0.92) * height
    start, stop = _radius_at(profile, low), _radius_at(profile, high)
    angle = np.linspace(-np.pi / 2, np.pi / 2, 10)
    path = np.zeros((10, 3))
    bow = between(rng, 0.18, 0.36)
    path[:, 0] = np.linspace(start, stop, 10) - 0.03 + bow * np.cos(angle)
    path[:, 2] = (low + high) / 2 + (high - low) / 2 * np.sin(angle)
    return tube(path, between(rng, 0.06, 0.1))


def gear(rng: np.random.Generator) -> list[Part]:
    """A wheel with teeth around its rim."""
    thick, root = between(rng, 0.15, 0.5), between(rng, 0.64, 0.76)
    parts = _web(rng, root, thick)
    teeth = count(rng, 7, 11)
    width = between(rng, 1.5, 1.9) * root / teeth
    for along in map(np.array, around(teeth)):
        foot, tip = along * root * 0.96, np.array([-along[1], along[0]]) * width
        tooth = [foot - tip * 0.9, along - tip * 0.5, along + tip * 0.5, foot + tip * 0.9]
        parts.append(prism(np.array(tooth), 0, thick))
    return _laid(rng, parts)


def pulley(rng: np.random.Generator) -> list[Part]:
    """A wheel with one or two deep grooves for belts in its rim."""
    thick, grooves = between(rng, 0.25, 0.5), count(rng, 1, 2)
    bottom = between(rng, 0.64, 0.76)
    parts = _web(rng, bottom, thick)
    lip = thick / grooves * between(rng, 0.12, 0.25)
    profile = [(bottom - 0.02, 0.0)]
    for groove in range(grooves):
        low, high = thick * groove / grooves, thick * (groove + 1) / grooves
        profile += [(1.0, low), (1.0, low + lip), (bottom, (low + high) / 2), (1.0, high - lip)]
    parts.append(lathe([*profile, (1.0, thick), (bottom - 0.02, thick)], sections=32))
    return _laid(rng, parts)


def wheel(rng: np.random.Generator) -> list[Part]:
    """A wheel with a round tyre on its rim."""
    thick, bulge = between(rng, 0.2, 0.5), between(rng, 0.14, 0.26)
    parts = _web(rng, 1 - bulge, thick)
    angle = np.linspace(-np.pi / 2, np.pi / 2, 8)
    tyre = [
        (1 - bulge + bulge * np.cos(a), thick / 2 + (thick / 2 + 0.04) * np.sin(a)) for a in angle
    ]
    inner = 1 - bulge - between(rng, 0.02, 0.08)
    profile = [(inner, 0.0), *tyre, (inner, thick), (inner, 0.0)]
    parts.append(lathe(profile, sections=32))
    return _laid(rng, parts)


def flange(rng: np.random.Generator) -> list[Part]:
    """A plate with a circle of bolts around its bore, on a length of pipe."""
    thick, bore = between(rng, 0.12, 0.3), between(rng, 0.2, 0.4)
    pipe, length = bore + between(rng, 0.05, 0.12), between(rng, 0.1, 0.5)
    parts = [_washer(1.0, bore, 0, thick), _washer(pipe, bore, 0, thick + length)]
    middle, size = (1 + pipe) / 2, (1 - pipe) * between(rng, 0.2, 0.32)
    for cosine, sine in around(count(rng, 4, 8)):
        x, y = middle * cosine, middle * sine
        parts.append(rod((x, y, -0.12), (x, y, thick + size), size, sections=6))
    return _laid(rng, parts)


def _web(rng: np.random.Generator, rim: float, thick: float) -> list[Part]:
    """A hub with a bore, a solid or spoked web, and a rim of radius ``rim`` and width ``thick``."""
    bore = between(rng, 0.1, 0.2)
    hub, proud = bore + between(rng, 0.08, 0.15), thick * between(rng, 0.0, 0.5)
    inner = rim - between(rng, 0.06, 0.14)
    parts = [_washer(rim, inner, 0, thick), _washer(hub, bore, -proud, thick + proud)]
    if chance(rng, 0.4):
        return [*parts, _washer(inner, hub, thick * 0.35, thick * 0.65)]
    size = between(rng, 0.05, 0.09)
    for cosine, sine in around(count(rng, 3, 6)):
        start, end = (hub * cosine, hub * sine), (inner * cosine, inner * sine)
        parts.append(rod((*start, thick / 2), (*end, thick / 2), size, sections=8))
    return parts


def _washer(outer: float, inner: float, low: float, high: float) -> Part:
    profile = [(inner, low), (outer, low), (outer, high), (inner, high), (inner, low)]
    return lathe(profile, sections=32)


def _laid(rng: np.random.Generator, parts: list[Part]) -> list[Part]:
    """Returns the parts lying flat or standing on edge, sometimes with a length of shaft."""
    if chance(rng, 0.6):
        low, high = between(rng, -0.9, 0.0), between(rng, 0.3, 1.2)
        parts = [*parts, rod((0, 0, low), (0, 0, high), between(rng, 0.08, 0.2), sections=16)]
    if chance(rng, 0.5):
        return parts
    return [turned(part, np.pi / 2, "x") for part in parts]


def airplane(rng: np.random.Generator) -> list[Part]:
    """A fuselage with wings, a tail and jets or propellers."""
    length, radius = between(rng, 0.8, 1.1), between(rng, 0.07, 0.14)
    span, sweep = between(rng, 0.6, 1.1), between(rng, -0.05, 0.5)
    share = np.array([-1, -0.92, -0.75, -0.3, 0.4, 0.8, 1.0])
    girth = np.array([0.05, 0.5, 0.9, 1.0, 1.0, 0.6, 0.15]) * radius
    circle = np.column_stack([np.zeros(16), superellipse(1, 1, points=16)])
    parts = [skin([circle * r + [-s * length, 0, 0] for s, r in zip(share, girth, strict=True)])]
    chord, z = between(rng, 0.25, 0.4), radius * between(rng, -0.7, 0.9)
    x = between(rng, -0.1, 0.15)
    dihedral = between(rng, 0.0, 0.15)
    for side in (-1, 1):
        parts.append(_wing((x, 0, z), side * span, chord, sweep, dihedral))
    tail_x, tail = -length * 0.85, between(rng, 0.25, 0.4)
    high = tail * 0.9 if chance(rng, 0.3) else 0.03
    for side in (-1, 1):
        parts.append(_wing((tail_x, 0, high), side * tail, chord * 0.5, sweep * 0.4, 0.02))
    fin = _wing((tail_x, 0, 0), tail * 1.05, chord * 0.6, 0.2, 0.0)
    parts.append(turned(fin, np.pi / 2, "x"))
    style = count(rng, 0, 2)
    if style == 0:  # a propeller at the nose
        blade = between(rng, 0.15, 0.25)
        parts.append(box((length, -0.03, -blade), (length + 0.03, 0.03, blade)))
        return [*parts, ball((length, 0, 0), (0.08, 0.05, 0.05))]
    for place in (0.35,) if style == 1 else (0.3, 0.6):
        for side in (-1, 1):
            y, nose = side * place * span, x + 0.2 - sweep * place * span
            parts.append(rod((nose - 0.3, y, z - 0.07), (nose, y, z - 0.07), 0.055))
    return parts


def _wing(
    root: tuple[float, float, float], span: float, chord: float, sweep: float, rise: float
) -> Part:
    rings: list[Array] = []
    profile = np.array([[0.5, 0.0], [0.1, 0.06], [-0.5, 0.0], [0.1, -0.06]])
    for share, size in ((0.0, 1.0), (1.0, 0.4)):
        ring = np.zeros((4, 3))
        ring[:, 0] = profile[:, 0] * chord * size - sweep * share * abs(span)
        ring[:, 2] = profile[:, 1] * chord * size + rise * share
        ring[:, 1] = span * share
        rings.append(ring + root)
    return skin(rings)


def guitar(rng: np.random.Generator) -> list[Part]:
    """A waisted body, a long neck, a head with pegs; standing or lying."""
    length, half_y = between(rng, 0.42, 0.55), between(rng, 0.3, 0.4)
    thick, neck = between(rng, 0.08, 0.2), between(rng, 0.6, 0.85)
    angle = circle_angles(40)
    x, y = length * np.cos(angle), half_y * np.sin(angle)
    waist = 1 - between(rng, 0.2, 0.4) * np.exp(-(((x - 0.1 * length) / (0.3 * length)) ** 2))
    upper = np.where(x > 0, between(rng, 0.7, 0.9), 1.0)
    body = prism(np.column_stack([x, y * waist * upper]), 0, thick)
    end, wide = length + neck, between(rng, 0.035, 0.055)
    parts = [
        body,
        box((0, -wide, thick), (end, wide, thick + 0.04)),
        box((end, -wide * 1.8, thick - 0.01), (end + 0.2, wide * 1.8, thick + 0.03)),
        box((-length * 0.6, -0.1, thick), (-length * 0.5, 0.1, thick + 0.04)),
        lathe([(0.09, thick), (0.12, thick), (0.12, thick + 0.02), (0.09, thick + 0.02)]),
    ]
    for i in range(3):
        at = end + 0.04 + 0.06 * i
        parts.append(rod((at, -wide * 3, thick), (at, wide * 3, thick), 0.015, sections=6))
    if chance(rng, 0.6):  # leaning on its stand
        return [turned(part, -np.pi / 2, "y") for part in parts]
    return parts
