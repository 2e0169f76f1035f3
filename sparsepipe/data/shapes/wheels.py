"""Round machine elements share hub and web; rim, teeth and bolts tell them apart."""

from __future__ import annotations

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, count
from sparsepipe.data.shapes.parts import Part, around, lathe, prism, rod, turned


def gear(rng: np.random.Generator) -> list[Part]:
    """A rim with teeth."""
    thick, root = between(rng, 0.15, 0.5), between(rng, 0.64, 0.76)
    parts = _web(rng, root, thick)
    teeth = count(rng, 7, 11)
    width = between(rng, 1.5, 1.9) * root / teeth
    parts += [_tooth(direction, root, width, thick) for direction in around(teeth)]
    return _laid(rng, parts)


def pulley(rng: np.random.Generator) -> list[Part]:
    """A rim with one or two deep grooves for belts."""
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
    """A rim in a round tyre."""
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
    """Hub with a bore, a solid or spoked web and an inner rim, out to the radius ``rim``."""
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


def _tooth(direction: tuple[float, float], root: float, width: float, thick: float) -> Part:
    along = np.array(direction)
    side = np.array([-along[1], along[0]])
    foot, tip = along * root * 0.96, side * width
    outline = np.array([foot - tip * 0.9, along - tip * 0.5, along + tip * 0.5, foot + tip * 0.9])
    return prism(outline, 0, thick)


def _laid(rng: np.random.Generator, parts: list[Part]) -> list[Part]:
    """On a length of shaft or not; lying on the face or standing on the edge."""
    if chance(rng, 0.6):
        low, high = between(rng, -0.9, 0.0), between(rng, 0.3, 1.2)
        parts = [*parts, rod((0, 0, low), (0, 0, high), between(rng, 0.08, 0.2), sections=16)]
    if chance(rng, 0.5):
        return parts
    return [turned(part, np.pi / 2, "x") for part in parts]
