"""Furniture: seats, tables, cases and lamps, which share legs, seats, tops and carcasses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sparsepipe.data.shapes.solids import (
    Part,
    around,
    ball,
    between,
    box,
    chance,
    count,
    disc,
    lathe,
    loft,
    moved,
    prism,
    rod,
    superellipse,
    things,
    turned,
)


def four_legs(
    rng: np.random.Generator, half_x: float, half_y: float, height: float, *, rungs: float = 0.35
) -> list[Part]:
    """Four legs, round or square, upright or splayed; ``rungs``: chance that rungs tie them."""
    radius = between(rng, 0.02, 0.045)
    splay = between(rng, 0, 0.15) if chance(rng, 0.5) else 0.0
    square = splay == 0 and chance(rng, 0.5)
    parts, margin = [], np.array([radius, radius, 0])
    corners = [(1, 1), (1, -1), (-1, -1), (-1, 1)]
    for x, y in corners:
        top = np.array([x * (half_x - radius), y * (half_y - radius), height])
        foot = np.array([top[0] * (1 + splay), top[1] * (1 + splay), 0])
        if square:
            parts.append(box(foot - margin, top + margin))
        else:
            parts.append(rod(foot, top, radius))
    if chance(rng, rungs):
        level = between(rng, 0.2, 0.5)
        reach = 1 + splay * (1 - level)
        ring = [
            (x * (half_x - radius) * reach, y * (half_y - radius) * reach, level * height)
            for x, y in corners
        ]
        parts += _closed(ring, radius * 0.6)
    return parts


def pedestal(rng: np.random.Generator, reach: float, height: float) -> list[Part]:
    """A central column on a disc or a star of feet, of radius ``reach``."""
    parts = [disc(between(rng, 0.03, 0.07), 0, height)]
    if chance(rng, 0.5):
        return [*parts, disc(reach, 0, between(rng, 0.02, 0.06))]
    return parts + [
        rod((0, 0, 0.08), (reach * cosine, reach * sine, 0.03), 0.035, sections=6)
        for cosine, sine in around(count(rng, 3, 5))
    ]


def _closed(ring: list[tuple[float, float, float]], radius: float) -> list[Part]:
    return [
        rod(start, end, radius, sections=6)
        for start, end in zip(ring, ring[1:] + ring[:1], strict=True)
    ]


def stool(rng: np.random.Generator) -> list[Part]:
    """An upholstered seat without a back, thicker than any table's top."""
    half_x, half_y, top, parts = _seat(rng)
    thick, share = between(rng, 0.06, 0.12), between(rng, 0.8, 1.0)
    outline = superellipse(half_x * share, half_y * share, power=between(rng, 2, 8))
    parts += things(rng, half_x, half_y, top + thick, most=1)
    return [*parts, loft([outline, outline, outline * 0.85], [top, top + thick * 0.6, top + thick])]


def chair(rng: np.random.Generator) -> list[Part]:
    """A seat with a back, but without arms."""
    half_x, half_y, top, parts = _seat(rng)
    return parts + _back(rng, half_x, -half_y, top, between(rng, 0.3, 0.6))


def armchair(rng: np.random.Generator) -> list[Part]:
    """A seat with a back and two arms."""
    half_x, half_y, top, parts = _seat(rng)
    parts += _back(rng, half_x, -half_y, top, between(rng, 0.3, 0.6))
    rise, reach = between(rng, 0.14, 0.24), between(rng, 0.5, 0.95) * half_y
    wide, closed = between(rng, 0.02, 0.045), chance(rng, 0.3)
    for x in (-half_x, half_x):  # arms on posts, or closed down to the seat
        low = top if closed else top + rise - 0.035
        parts.append(box((x - wide, -half_y, low), (x + wide, reach, top + rise)))
        parts.append(rod((x, reach - 0.03, top - 0.04), (x, reach - 0.03, top + rise), 0.022))
    return parts


def _seat(rng: np.random.Generator) -> tuple[float, float, float, list[Part]]:
    """Draws a seat on legs or a pedestal: half width, half depth, height of the top, and parts."""
    half_x, half_y = between(rng, 0.18, 0.28), between(rng, 0.18, 0.28)
    height, thick = between(rng, 0.36, 0.6), between(rng, 0.03, 0.09)
    if chance(rng, 0.6):
        power = between(rng, 6, 10)
    else:
        power, half_y = 2.0, half_x
    parts = [prism(superellipse(half_x, half_y, power=power), height, height + thick)]
    if chance(rng, 0.3):
        parts += pedestal(rng, half_x * between(rng, 0.9, 1.2), height)
    elif power == 2.0 and chance(rng, 0.6):
        # Three or four legs that spread from under the round seat, tied by rungs.
        spread, thin = between(rng, 1.0, 1.4), between(rng, 0.018, 0.035)
        directions, top = around(count(rng, 3, 4)), half_x * 0.7
        parts += [
            rod((half_x * spread * x, half_x * spread * y, 0), (top * x, top * y, height), thin)
            for x, y in directions
        ]
        level = between(rng, 0.25, 0.5)
        reach = half_x * (spread + (0.7 - spread) * level)
        ring = [(reach * x, reach * y, level * height) for x, y in directions]
        parts += _closed(ring, thin * 0.7)
    else:
        inset = 0.75 if power == 2.0 else 1.0
        parts += four_legs(rng, half_x * inset, half_y * inset, height)
    return half_x, half_y, height + thick, parts


def _back(
    rng: np.random.Generator, half_x: float, y: float, low: float, height: float
) -> list[Part]:
    """A back of a given height at position ``y``, on a seat whose top is at height ``low``."""
    high = low + height
    style = ("panel", "shield", "ladder", "bars")[count(rng, 0, 3)]
    if style == "panel":
        thick, gap = between(rng, 0.025, 0.06), between(rng, 0, 0.12)
        return [
            box((-half_x, y, low + gap), (half_x, y + thick, high)),
            rod((0, y + 0.02, low - 0.03), (0, y + 0.02, low + gap + 0.02), 0.03),
        ]
    if style == "shield":
        outline = superellipse(half_x, height / 2, power=2.5)
        shield = turned(prism(outline, 0, between(rng, 0.025, 0.06)), np.pi / 2, "x")
        return [moved(shield, (0, y + 0.04, low + height / 2))]
    parts = [
        rod((x, y + 0.02, low - 0.02), (x, y, high), 0.024) for x in (-half_x + 0.02, half_x - 0.02)
    ]
    if style == "ladder":
        step = height / count(rng, 2, 4)
        tops = np.arange(high, low + step / 2, -step)
        return parts + [box((-half_x, y, z - step / 2), (half_x, y + 0.02, z)) for z in tops]
    parts += [
        rod((x, y + 0.01, low - 0.01), (x, y + 0.01, high), 0.014, sections=6)
        for x in np.linspace(-half_x, half_x, count(rng, 3, 6) + 2)[1:-1]
    ]
    return [*parts, box((-half_x, y, high - 0.07), (half_x, y + 0.03, high))]


def bookshelf(rng: np.random.Generator) -> list[Part]:
    """A case open in front, with shelves, and sometimes with a divider, a back or books."""
    half_x, depth, height, base, parts = _carcass(rng)
    levels = np.linspace(base, height, count(rng, 3, 6) + 1)
    thick = between(rng, 0.02, 0.035)
    parts += [box((-half_x, 0, z), (half_x, depth, z + thick)) for z in levels[1:-1]]
    if chance(rng, 0.35):
        x = between(rng, -0.4, 0.4) * half_x
        parts.append(box((x, 0, base), (x + thick, depth, height)))
    if not chance(rng, 0.4):
        return parts
    room = levels[1] - levels[0]
    for z in levels[:-1]:  # books
        start = between(rng, -0.95, 0.3) * half_x
        for i in range(count(rng, 0, 4)):
            left, tall = start + i * 0.14 * half_x, between(rng, 0.5, 0.8) * room
            parts.append(box((left, 0.02, z), (left + 0.1 * half_x, depth * 0.75, z + tall)))
    return parts


def cabinet(rng: np.random.Generator) -> list[Part]:
    """A case closed by doors with handles; behind the doors is a shelf, a rail or nothing."""
    half_x, depth, height, base, parts = _carcass(rng)
    doors = 1 if half_x < 0.35 else count(rng, 2, 3)
    edges, proud = np.linspace(-half_x, half_x, doors + 1), between(rng, 0.02, 0.04)
    for left, right in pairwise(edges):
        low, high = (left + 0.02, depth, base + 0.03), (right - 0.02, depth + proud, height - 0.03)
        parts.append(box(low, high))
        z, front = between(rng, 0.4, 0.6) * height, depth + proud
        x = left + (right - left) * 0.85
        parts.append(box((x - 0.02, front, z - 0.1), (x + 0.02, front + 0.05, z + 0.1)))
    inside = count(rng, 0, 2)
    if inside == 2:
        z = height * 0.85
        parts.append(rod((-half_x, depth / 2, z), (half_x, depth / 2, z), 0.02))
    elif inside == 1:
        z = between(rng, 0.3, 0.7) * height
        parts.append(box((-half_x, 0, z), (half_x, depth, z + 0.03)))
    return parts


def dresser(rng: np.random.Generator) -> list[Part]:
    """A case full of drawers with knobs or bars as handles."""
    half_x, depth, height, base, parts = _carcass(rng)
    columns = 1 if half_x < 0.4 else 2
    parts += drawers(rng, (-half_x, half_x), (0, depth), (base, height), columns=columns)
    return parts


def _carcass(rng: np.random.Generator) -> tuple[float, float, float, float, list[Part]]:
    """Draws a case open in front: half width, depth, height, height of the floor, and parts."""
    half_x, depth = between(rng, 0.3, 0.6), between(rng, 0.3, 0.5)
    height, base = between(rng, 0.7, 1.4), between(rng, 0.04, 0.16)
    thick = between(rng, 0.02, 0.035)
    parts = [
        box((-half_x - thick, 0, base), (-half_x, depth, height)),
        box((half_x, 0, base), (half_x + thick, depth, height)),
        box((-half_x, 0, base), (half_x, depth, base + thick)),
        box((-half_x - 0.03, -0.02, height), (half_x + 0.03, depth + 0.03, height + thick)),
    ]
    if chance(rng, 0.5):
        above = things(rng, half_x, depth / 2, height + thick)
        parts += [moved(part, (0, depth / 2, 0)) for part in above]
    if chance(rng, 0.85):
        parts.append(box((-half_x, 0, base), (half_x, 0.02, height)))
    if chance(rng, 0.6):
        parts += [
            rod((x, y, 0), (x, y, base), 0.035, sections=8)
            for x in (-half_x + 0.05, half_x - 0.05)
            for y in (0.05, depth - 0.05)
        ]
    else:
        parts.append(box((-half_x, 0, 0), (half_x, depth - 0.05, base)))
    return half_x, depth, height, base, parts


def drawers(
    rng: np.random.Generator,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    z_range: tuple[float, float],
    *,
    columns: int,
) -> list[Part]:
    """Two to four rows of drawers that fill these ranges of a case; fronts stand out towards +y."""
    rows, proud, bar = count(rng, 2, 4), between(rng, 0.02, 0.05), chance(rng, 0.5)
    xs, zs = np.linspace(*x_range, columns + 1), np.linspace(*z_range, rows + 1)
    back, plane = y_range
    front, parts = plane + proud, []
    for left, right in pairwise(xs):
        for low, high in pairwise(zs):
            parts.append(
                box((left + 0.015, plane, low + 0.015), (right - 0.015, front, high - 0.015))
            )
            inner = (right - 0.02, plane, high - (high - low) * 0.3)
            parts.append(box((left + 0.02, back + 0.03, low + 0.03), inner))
            x, z = (left + right) / 2, (low + high) / 2
            reach = (right - left) / 5 if bar else 0.03
            parts.append(box((x - reach, front, z - 0.02), (x + reach, front + 0.04, z + 0.02)))
    return parts


def table(rng: np.random.Generator) -> list[Part]:
    """A top on four legs, on a pedestal or on trestles; the space below it is otherwise empty."""
    half_x, half_y, height = _proportions(rng)
    thick, round_top = between(rng, 0.025, 0.05), chance(rng, 0.2)
    power = 2.0 if round_top else between(rng, 8, 14)
    top = prism(superellipse(half_x, half_y, power=power, points=36), height, height + thick)
    above = things(rng, half_x, half_y, height + thick)
    if chance(rng, 0.2):
        return [top, *above, *pedestal(rng, half_y * 0.6, height)]
    inset = 0.68 if round_top else between(rng, 0.85, 1.0)
    x, y = half_x * inset, half_y * inset
    if chance(rng, 0.2):
        parts, x = [top, *above], x * 0.85  # trestles
        post, crossed = between(rng, 0.02, 0.05), chance(rng, 0.5)
        for side in (-x, x):
            if crossed:
                parts += [
                    rod((side, y * end, 0), (side, -y * end * 0.8, height), post)
                    for end in (-0.85, 0.85)
                ]
            else:
                low, high = (side - post, -y * 0.85, 0), (side + post, y * 0.85, height)
                parts.append(box(low, high))
        return [*parts, rod((-x, 0, height * 0.45), (x, 0, height * 0.45), post * 0.8)]
    parts = [top, *above, *four_legs(rng, x, y, height)]
    if chance(rng, 0.4):
        edge, x, y = height - between(rng, 0.06, 0.12), x * 0.95, y * 0.95
        aprons = [(side * y - 0.01, side * y + 0.01) for side in (-1, 1)]
        parts += [box((-x, near, edge), (x, far, height)) for near, far in aprons]
    return parts


def desk(rng: np.random.Generator) -> list[Part]:
    """A table with a block of drawers on one side or both, and sometimes a panel at the back."""
    half_x, half_y, height = _proportions(rng)
    thick = between(rng, 0.025, 0.05)
    parts = [box((-half_x, -half_y, height), (half_x, half_y, height + thick))]
    parts += things(rng, half_x, half_y, height + thick)
    parts += four_legs(rng, half_x, half_y, height, rungs=0.0)
    width, hang = between(rng, 0.45, 0.8) * half_x, between(rng, 0.3, 0.85) * height
    for side in (-1, 1) if chance(rng, 0.3) else (1,):
        left, right = sorted((side * half_x * 0.97, side * (half_x * 0.97 - width)))
        low, y = (left, -half_y * 0.95, height - hang), half_y * 0.9
        parts.append(box(low, (right, y, height)))
        parts += drawers(rng, (left, right), (low[1], y), (low[2], height), columns=1)
    if chance(rng, 0.4):
        low_edge = between(rng, 0.1, 0.6) * height
        parts.append(box((-half_x, -half_y, low_edge), (half_x, -half_y + 0.02, height)))
    return parts


def trolley(rng: np.random.Generator) -> list[Part]:
    """A table on wheels with one or two shelves between the legs, and sometimes a handle."""
    half_x, half_y, height = _proportions(rng)
    thick = between(rng, 0.025, 0.05)
    parts = [box((-half_x, -half_y, height), (half_x, half_y, height + thick))]
    parts += things(rng, half_x, half_y, height + thick)
    parts += four_legs(rng, half_x, half_y, height, rungs=0.0)
    for level in np.linspace(between(rng, 0.12, 0.35), 1, count(rng, 2, 3))[:-1]:
        z, x, y = level * height, half_x * 0.95, half_y * 0.95
        parts.append(box((-x, -y, z), (x, y, z + thick * 0.7)))
    size = between(rng, 0.03, 0.06)
    parts += [
        ball((x * half_x * 0.93, y * half_y * 0.93, size / 2), (size, size / 2, size))
        for x in (-1, 1)
        for y in (-1, 1)
    ]
    if chance(rng, 0.3):
        x, z = half_x + 0.06, height + between(rng, 0.03, 0.12)
        parts.append(rod((x, -half_y * 0.9, z), (x, half_y * 0.9, z), 0.02))
        parts += [
            rod((half_x * 0.9, y, height), (x, y, z), 0.018, sections=6)
            for y in (-half_y * 0.9, half_y * 0.9)
        ]
    return parts


def _proportions(rng: np.random.Generator) -> tuple[float, float, float]:
    """Draws half width, half depth and height of a table, desk or trolley."""
    half_x = between(rng, 0.45, 0.8)
    return half_x, half_x * between(rng, 0.5, 0.95), between(rng, 0.5, 0.85)


def lamp(rng: np.random.Generator) -> list[Part]:
    """A table or floor lamp: a foot, a pole and a shade, sometimes at the end of an arm."""
    height, shade = between(rng, 0.5, 1.5), between(rng, 0.14, 0.3)
    parts = [disc(between(rng, 0.1, 0.22), 0, between(rng, 0.02, 0.07))]
    reach = between(rng, 0.2, 0.5) if chance(rng, 0.35) else 0.0
    pole = between(rng, 0.012, 0.03)
    parts.append(rod((0, 0, 0), (0, 0, height), pole))
    if reach:
        drop = between(rng, -0.1, 0.3)
        parts.append(rod((0, 0, height), (reach, 0, height + 0.3 - drop), pole))
        top = height + 0.32 - drop
    elif chance(rng, 0.4):  # a body of turned wood or ceramics
        parts.append(ball((0, 0, height * 0.35), (0.12, 0.12, height * 0.25)))
        top = height + 0.05
    else:
        top = height + 0.05
    tall, upper, wall = shade * between(rng, 0.8, 1.5), between(rng, 0.35, 1.0), 0.012
    profile = [
        (shade, -tall),
        (shade * upper, 0.0),
        (shade * upper - wall, 0.0),
        (shade - wall, -tall),
        (shade, -tall),
    ]
    return [*parts, moved(lathe(profile), (reach, 0, top + tall * 0.2))]
