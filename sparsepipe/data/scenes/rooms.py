"""Generated rooms: scans of furnished rooms whose points have labels of thirteen classes.

A room has walls with doors and windows, beams, columns, furniture and clutter. Classes overlap in
colour and form: cabinets are clutter and bookcases are not, pictures hang where boards do.
``benchmarks/rooms_baselines.py`` measures how far height, colour and normal of single points go.

Lengths are in metres, and z is up. A position on the floor is a complex number, x + iy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.cache import CacheSettings, write_missing
from sparsepipe.data.files import digest_values, explaining_storage
from sparsepipe.data.formats.ply import write_ply
from sparsepipe.data.points import SPLITS
from sparsepipe.data.scenes.reader import SceneReader
from sparsepipe.data.scenes.scanner import scan
from sparsepipe.data.scenes.sources import SceneFolder
from sparsepipe.data.shapes import furniture, solids
from sparsepipe.data.shapes.solids import Part, between, box, chance, count, rod
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import Count, Seed, checked
from sparsepipe.utils.files import expanded

ROOM_CLASSES = (
    *("ceiling", "floor", "wall", "beam", "column", "window", "door"),
    *("table", "chair", "sofa", "bookcase", "board", "clutter"),
)
"""Names of the classes, indexed by the labels: those of S3DIS."""
VERSION = 1
"""Increased with any change to a room's points; part of the folder's name."""

_COLORS = {
    "white": "ebebe6 ccccc7 e0d9c7",
    "grey": "999999 66696e 38383d 1a1a1c",
    "wood": "8c6138 b88f5e 5c3b24 d4b88c",
    "paint": "bfd4e0 ccdbbd e6ccbd d6c799",
    "fabric": "992624 263d80 336640 bf8c26",
    "sky": "b3d1f2 4d616b e6edf2 141724",
    "slate": "1f4d33 1f1f1f b38554",
}
_PALETTES = {
    **dict.fromkeys(ROOM_CLASSES, "wood wood white grey fabric"),
    **dict.fromkeys(("ceiling", "wall", "beam", "column"), "white white white paint paint grey"),
    **{"pane": "sky", "board": "white slate", "clutter": "wood white grey fabric paint sky"},
}
_Frame: TypeAlias = tuple[complex, complex]
"""Where something stands: the position of its origin, and a number of modulus 1 that turns it."""


class _Room:
    """A room while it is built. In the frame of a wall, x is along it and y into the room."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.height = rng, between(rng, 2.4, 3.4)
        self.sides = x, y = between(rng, 3.5, 7), between(rng, 3.2, 6)
        self.walls: list[_Frame] = [(0, 1), (x, 1j), (x + y * 1j, -1), (y * 1j, -1j)]
        self.parts, self.seen = list[Part](), list[tuple[float, ...]]()  # label and look of each
        self.looks = defaultdict[str, list[list[float]]](list)
        self.taken = np.empty((0, 4))  # of the floor: lowest x and y, highest x and y
        self.spans: list[list[tuple[float, float]]] = [[], [], [], []]  # of each wall
        self.holes: list[list[tuple[float, float, float, float]]] = [[], [], [], []]  # in x, z

    def add(self, name: str, parts: list[Part], frame: _Frame = (0, 1), look: str = "") -> None:
        """Adds parts of an object, a quarter of those of furniture in a second colour.

        All parts of the building with one ``look`` have the same colour.
        """
        rng, label, (origin, turn) = self.rng, ROOM_CLASSES.index(name), frame
        looks = self.looks[look or name] if label < 7 else []
        if not looks:
            palette = _PALETTES[look or name].split()
            wave_3 = rng.normal(size=3) * between(rng, 5, 50) * chance(rng, 0.6)
            for _ in range(2):
                colors = _COLORS[palette[count(rng, 0, len(palette) - 1)]].split()
                color_3 = np.array([*bytes.fromhex(colors[count(rng, 0, len(colors) - 1)])]) / 255
                color_3 = np.clip(color_3 + rng.normal(0, 0.04, 3), 0.03, 0.97)
                returned = 0.4 if look == "pane" else 0.55 if color_3.max() < 0.15 else 0.97
                looks.append([*color_3, *wave_3, returned])
        for part in parts:
            turned = solids.turned(part, float(np.angle(turn)))
            self.parts.append(solids.moved(turned, (origin.real, origin.imag, 0)))
            self.seen.append((label, *looks[chance(rng, 0.25 * (label > 6))]))

    def on_wall(self, wall: int, width: float) -> _Frame | None:
        """Takes a free span of a wall, and returns the frame at its middle."""
        (origin, turn), spans = self.walls[wall], self.spans[wall]
        for _ in range(20):
            left = between(self.rng, 0.1, self.sides[wall % 2] - width - 0.1)
            right = left + width
            if left > 0 and all(b + 0.1 < left or right + 0.1 < a for a, b in spans):
                spans.append((left, right))
                return origin + turn * (left + right) / 2, turn
        return None

    def on_floor(
        self, width: float, depth: float, wall: float, high: bool = False
    ) -> _Frame | None:
        """Takes free floor, and returns the frame at the middle of its back.

        It is at a wall with probability ``wall``; there, a ``high`` thing is not before anything.
        """
        rng, at_wall = self.rng, chance(self.rng, wall)
        for _ in range(30):
            side = count(rng, 0, 3)
            origin, turn = self.walls[side]
            x = between(rng, width / 2, self.sides[side % 2] - width / 2)
            y = between(rng, 0.01, 0.08) if at_wall else between(rng, 0, self.sides[1 - side % 2])
            frame = origin + turn * (x + y * 1j), turn
            if not at_wall:
                frame = frame[0], turn * np.exp(1j * rng.normal(0, 0.15))
            elif high and any(a < x + width / 2 and x - width / 2 < b for a, b in self.spans[side]):
                continue
            if self.take(frame, width, depth):
                return frame
        return None

    def take(self, frame: _Frame, width: float, depth: float) -> bool:
        """Takes the floor before a frame, ``width`` x ``depth``; returns whether it was free."""
        corners = frame[0] + frame[1] * np.add.outer([-width / 2, width / 2], [0, depth * 1j])
        low_2 = np.array([corners.real.min(), corners.imag.min()])
        high_2 = np.array([corners.real.max(), corners.imag.max()])
        apart = (self.taken[:, :2] >= high_2) | (self.taken[:, 2:] <= low_2)
        is_inside = (low_2 > -0.01).all() and (high_2 < np.array(self.sides) + 0.01).all()
        if is_free := bool(is_inside and apart.any(axis=1).all()):
            self.taken = np.vstack([self.taken, [*low_2, *high_2]])
        return is_free


def make_room(rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Furnishes and scans a room, turned by any angle about z.

    Returns float32 [P, 3] ``coord``, ``color`` from 0 to 1 and ``normal``, and uint8 ``label`` [P].
    """
    room = _Room(rng)
    for build in (_openings, _shell, _hangings, _tables, _sofas, _cases, _clutter):
        build(room)
    corners_T33 = np.concatenate([part.vertices_V3[part.faces_F3] for part in room.parts])
    seen_T8 = np.repeat(room.seen, [len(part.faces_F3) for part in room.parts], axis=0)
    label_T, looks_T7 = seen_T8[:, 0], seen_T8[:, 1:]
    # The scanner stands clear of furniture, as far as there are such places.
    places_N2 = rng.uniform(0.5, 1, (60, 2)) * (np.array(room.sides) - 0.5)
    ground_N14 = np.hstack([places_N2, -places_N2])[:, None]
    gaps_N = (room.taken * [1, 1, -1, -1] - ground_N14).max(axis=2).min(axis=1)
    clear = np.flatnonzero(gaps_N > min(gaps_N.max() - 1e-6, 0.25))
    clear = clear[places_N2[clear, 0].argsort()]
    step, scans = between(rng, 1.6, 2.2), list[dict[str, NDArray[Any]]]()
    lamp_3 = np.array([*rng.uniform(0.2, 0.8, 2) * room.sides, room.height - 0.3])
    for place in clear[np.linspace(0, len(clear) - 1, count(rng, 2, 4)).astype(int)]:
        stand_3 = np.array([*places_N2[place], between(rng, 1.2, 1.8)])
        rows_P, found = scan(corners_T33, looks_T7, stand_3, rng, lamp_3=lamp_3, step_deg=step)
        found["coord"] += rng.normal(0, 0.004, 3).astype(np.float32)  # is not quite registered
        scans.append({**found, "label": label_T[rows_P].astype(np.uint8)})
    columns = {name: np.concatenate([each[name] for each in scans]) for name in scans[0]}
    cosine, sine = np.cos(angle := between(rng, 0, 2 * np.pi)), np.sin(angle)
    turn_33 = np.array([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]], np.float32)
    return columns | {name: columns[name] @ turn_33 for name in ("coord", "normal")}


def _rim(half: float, low: float, high: float, back: float, front: float) -> list[Part]:
    """Four bars around a rectangle of a wall, which is ``2 half`` wide."""
    bars = [box((x - 0.03, back, low), (x + 0.03, front, high)) for x in (-half, half)]
    return bars + [box((-half, back, z - 0.03), (half, front, z + 0.03)) for z in (low, high)]


def _openings(room: _Room) -> None:
    """Doors and windows, in holes of the walls, and a shaft in the corner of some rooms."""
    rng = room.rng
    if chance(rng, 0.35):
        corner, x, y = count(rng, 0, 3), between(rng, 0.4, 2), between(rng, 0.4, 1.6)
        (origin, turn), before = room.walls[corner], (corner - 1) % 4
        room.take((origin + turn * x / 2, turn), x, y)
        room.add("wall", [box((0, 0, 0), (x, y, room.height))], room.walls[corner])
        room.spans[corner].append((0, x))
        room.spans[before].append((room.sides[before % 2] - y, room.sides[before % 2]))
    for _ in range(count(rng, 1, 2)):
        wide, tall, wall = between(rng, 0.8, 1.0), between(rng, 2.0, 2.2), count(rng, 0, 3)
        if frame := room.on_wall(wall, wide):
            room.holes[wall].append((*room.spans[wall][-1], 0, tall))
            room.take(frame, wide + 0.2, 0.9)
            half, back, x = wide / 2, -between(rng, 0.02, 0.18), wide - 0.08
            leaf = [box((0, back, 0.01), (wide, back + 0.04, tall - 0.02))]
            leaf.append(box((x - 0.12, back, 1.03), (x, back + 0.1, 1.06)))
            ajar = between(rng, 0.2, 1.7) * chance(rng, 0.3)
            room.add("door", _rim(half, -0.1, tall, back, 0.02), frame)
            room.add("door", leaf, (frame[0] - frame[1] * half, frame[1] * np.exp(1j * ajar)))
    for wall in rng.permutation(4)[: count(rng, 1, 2)].tolist():
        wide, low = between(rng, 0.7, 2.0), between(rng, 0.1 if chance(rng, 0.15) else 0.6, 1.1)
        half, back, high = wide / 2, -between(rng, 0.06, 0.25), low + between(rng, 1.0, 1.2)
        bars = np.linspace(-half, half, count(rng, 2, 4))[1:-1]
        for _ in range(count(rng, 1, 3)):
            if frame := room.on_wall(wall, wide):
                room.holes[wall].append((*room.spans[wall][-1], low, high))
                pane = box((-half, back, low), (half, back + 0.01, high))
                room.add("window", [pane], frame, "pane")
                rims = [box((x - 0.03, back, low), (x + 0.03, back + 0.05, high)) for x in bars]
                rims += _rim(half - 0.03, low + 0.03, high - 0.03, back, back + 0.06)
                room.add("window", rims, frame)
                radiator = box((-half * 0.8, 0.04, 0.12), (half * 0.8, 0.13, low - 0.12))
                room.add("clutter", [radiator] * (low > 0.6 and chance(rng, 0.5)), frame, "wall")


def _shell(room: _Room) -> None:
    """Floor, ceiling, walls around their holes, beams below the ceiling, and columns."""
    rng, (x, y), height = room.rng, room.sides, room.height
    room.add("floor", [box((-0.3, -0.3, -0.1), (x + 0.3, y + 0.3, 0))])
    room.add("ceiling", [box((-0.3, -0.3, height), (x + 0.3, y + 0.3, height + 0.1))])
    for wall, length in enumerate(room.sides * 2):
        start, panels = -0.3, list[Part]()
        for left, right, low, high in [*sorted(room.holes[wall]), (length, length, 0, height)]:
            panels.append(box((start, -0.3, 0), (left, 0, height)))
            panels.append(box((left, -0.3, 0), (right, 0, low)))
            panels.append(box((left, -0.3, high), (right, 0, height)))
            start = right
        room.add("wall", panels, room.walls[wall])
    wide, tall, wall = between(rng, 0.15, 0.45), between(rng, 0.12, 0.45), count(rng, 0, 1)
    beams = list[Part]()
    for _ in range(count(rng, 0, 3)):
        edge = between(rng, 0, room.sides[1 - wall] - wide) * chance(rng, 0.7)
        beams.append(box((0, edge, height - tall), (room.sides[wall], edge + wide, height)))
    room.add("beam", beams, room.walls[wall])
    half, is_round = between(rng, 0.1, 0.28), chance(rng, 0.3)
    pillar = box((-half, -0.08, 0), (half, 2 * half, height))
    if is_round:
        pillar = rod((0, half, 0), (0, half, height), half, sections=20)
    for _ in range(count(rng, 0, 2)):
        if frame := room.on_floor(2 * half, 2 * half, 0.6, high=True):
            room.add("column", [pillar], frame)


def _hangings(room: _Room) -> None:
    """Boards, and pictures, which are clutter."""
    rng = room.rng
    for name, most, size in (("board", 2, 1.0), ("clutter", 4, 0.4)):
        for _ in range(count(rng, 0, most)):
            half, tall = between(rng, 0.5, 1.3) * size, between(rng, 0.9, 1.3) * (size + 0.1)
            low, front = between(rng, 0.75, 1.0) / size**0.5, between(rng, 0.01, 0.05)
            if frame := room.on_wall(count(rng, 0, 3), 2 * half):
                room.add(name, [box((-half, 0, low), (half, front, low + tall))], frame)
                room.add(name, _rim(half, low, low + tall, 0, front + 0.01), frame, "clutter")


def _furnish(room: _Room, name: str, parts: list[Part], frame: _Frame, top: float) -> None:
    """Adds furniture; what stands on it, at a height of at least ``top``, is clutter."""
    is_above = [part.vertices_V3[:, 2].min() >= top - 1e-6 for part in parts]
    for each, above in ((name, False), ("clutter", True)):
        room.add(each, [p for p, a in zip(parts, is_above, strict=True) if a == above], frame)


def _tables(room: _Room) -> None:
    """Tables and desks with chairs."""
    rng = room.rng
    for _ in range(count(rng, 1, 3)):
        is_desk, gap = chance(rng, 0.4), between(rng, -0.12, 0.3)
        parts = (furniture.desk if is_desk else furniture.table)(rng)
        size_3 = 1 if is_desk else between(rng, 1, 2.2), 1, 1
        parts = [Part(part.vertices_V3 * size_3, part.faces_F3) for part in parts]
        half_x, half_y, top = parts[0].vertices_V3.max(axis=0).tolist()
        sides = (1,) if is_desk else (-1, 1)
        depth = 2 * half_y + len(sides) * (0.5 + gap)
        if not (frame := room.on_floor(2 * half_x, depth, is_desk)):
            continue
        origin, turn = frame[0] + frame[1] * (half_y if is_desk else depth / 2) * 1j, frame[1]
        _furnish(room, "table", parts, (origin, turn), top)
        if is_desk and chance(rng, 0.6):  # a screen
            half = between(rng, 0.2, 0.35)
            screen = [box((-0.1, -0.1, top), (0.1, 0.02, top + 0.15))]
            screen.append(box((-half, 0, top + 0.1), (half, 0.03, top + 0.1 + 1.2 * half)))
            room.add("clutter", screen, (origin + turn * rng.normal(0, 0.2), turn))
        style = furniture.armchair if chance(rng, 0.3) else furniture.chair
        seed, share = count(rng, 0, 2**31), between(rng, 0.3, 1)
        for side in sides:
            for x in np.arange(-half_x + 0.35, half_x - 0.25, 0.65):
                if chance(rng, share):
                    chair = style(np.random.default_rng(seed))  # chairs of a set are alike
                    place = x + rng.normal(0, 0.04) + side * (half_y + gap + 0.25) * 1j
                    facing = turn * -side * np.exp(1j * rng.normal(0, 0.25))
                    room.add("chair", chair, (origin + turn * place, facing))


def _sofas(room: _Room) -> None:
    rng = room.rng
    for _ in range(count(rng, 0, 2)):
        seats, arm, depth = count(rng, 1, 3), between(rng, 0.1, 0.22), between(rng, 0.75, 0.95)
        half, low, top = seats * between(rng, 0.25, 0.35), 0.1, between(rng, 0.36, 0.46)
        back, high, rest = between(rng, 0.18, 0.28), top + between(rng, 0.3, 0.5), top + 0.15
        parts = [box((x, 0, low), (x + arm, depth, rest)) for x in (-half - arm, half)]
        parts.append(box((-half, 0, low), (half, depth, top - 0.12)))
        parts.append(box((-half, 0, low), (half, back, high)))
        for a, b in pairwise(np.linspace(-half, half, seats + 1)):
            parts.append(box((a + 0.01, back, top - 0.12), (b - 0.01, depth + 0.02, top)))
            parts.append(box((a + 0.01, back, top), (b - 0.01, back + 0.12, high - 0.05)))
        if frame := room.on_floor(2 * (half + arm), depth + 0.1, 0.75):
            room.add("sofa", parts, frame)


def _cases(room: _Room) -> None:
    """Bookcases with books."""
    rng = room.rng
    for _ in range(count(rng, 0, 3)):
        size_3 = between(rng, 0.9, 1.6), between(rng, 0.7, 1), between(rng, 1.2, 1.7)
        parts = [Part(p.vertices_V3 * size_3, p.faces_F3) for p in furniture.bookshelf(rng)]
        half, depth, top = parts[3].vertices_V3.max(axis=0).tolist()
        if not (frame := room.on_floor(2 * half, depth, 1, high=True)):
            continue
        _furnish(room, "bookcase", parts, frame, top)
        for z in np.unique([part.vertices_V3[:, 2].max() for part in parts]):
            for x in rng.uniform(-0.9, 0.85, count(rng, 0, 12) * (z < top - 0.2)) * half:
                end = x + between(rng, 0.03, 0.07), depth * 0.7, z + between(rng, 0.15, 0.2)
                room.add("bookcase", [box((x, 0.05, z), end)], frame, "clutter")


def _clutter(room: _Room) -> None:
    """Cabinets, trolleys, lamps and boxes on the floor, and lamps below the ceiling."""
    rng, height = room.rng, room.height
    kinds = furniture.cabinet, furniture.dresser, furniture.trolley, furniture.lamp
    for _ in range(count(rng, 1, 5)):
        half, tall = between(rng, 0.1, 0.3), between(rng, 0.1, 0.6)
        boxes = [box((-half, 0, 0), (half, between(rng, 0.2, 0.5), tall))]
        parts = boxes if chance(rng, 0.4) else kinds[count(rng, 0, 3)](rng)
        vertices = np.concatenate([part.vertices_V3 for part in parts])
        low_3, (wide, deep, high) = vertices.min(axis=0), np.ptp(vertices, axis=0).tolist()
        if frame := room.on_floor(wide, deep, 0.7, high > 1):
            parts = [solids.moved(part, -low_3 - [wide / 2, 0, 0]) for part in parts]
            room.add("clutter", parts, frame)
    half, y = between(rng, 0.1, 0.35), room.sides[1] / 2
    deep = half * (1 + 2 * chance(rng, 0.5))
    for x in np.linspace(0, room.sides[0], count(rng, 3, 5))[1:-1]:
        lamp = box((x - half, y - deep, height - 0.07), (x + half, y + deep, height))
        room.add("clutter", [lamp], look="ceiling")


class GeneratedRooms(SceneFolder):
    """Source: generated rooms, as PLY files with colours, normals and labels.

    A room depends only on the seed, its split and its number. Files that are missing are written.

    Args:
        root: directory to write to; created if it is missing.
        reader: reads the rooms; it gets the names of their classes if it neither has nor maps any.
        cache: settings of the cache of parsed rooms.
        train_rooms: number of training rooms.
        test_rooms: number of test rooms.
        seed: seed of the rooms.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None,
        *,
        reader: SceneReader,
        cache: CacheSettings,
        train_rooms: Count = 240,
        test_rooms: Count = 48,
        seed: Seed = 0,
    ) -> None:
        if not root:
            raise ConfigError(
                "data.root is not set", remedy="set data.root to a directory to write rooms into"
            )
        self.root = expanded(root).absolute() / f"v{VERSION}_seed{seed}"
        with explaining_storage(self.root, setting="data.root"):
            self.root.mkdir(parents=True, exist_ok=True)
        if reader.classes is None and reader.learning_map is None:
            reader = replace(reader, classes=ROOM_CLASSES)
        super().__init__(self.root, reader=reader, cache=cache)
        self._seed, self._counts = seed, {"train": train_rooms, "val": 0, "test": test_rooms}

    @cached_property
    def _names(self) -> Mapping[Any, Sequence[str]]:
        names = {
            split: [f"{split}/room_{number:04d}.ply" for number in range(1, rooms + 1)]
            for split, rooms in self._counts.items()
        }
        missing = [n for each in names.values() for n in each if not (self.root / n).is_file()]
        write, cache = partial(_write_room, self.root, self._seed), self._cache
        write_missing(self.root, missing, write, cache=cache, per_worker=40, what="rooms")
        return names

    def fingerprint(self) -> str:
        """Returns a hex digest of the settings, which determine the rooms and their labels."""
        return digest_values([VERSION, self._seed, self._counts, repr(self._reader)])


def _write_room(root: Path, seed: int, name: str) -> None:
    path, (split, number) = root / name, name.removesuffix(".ply").split("/room_")
    if path.is_file():
        return
    room = make_room(np.random.default_rng([seed, SPLITS.index(split), int(number)]))
    room["color"] = np.rint(room["color"] * 255).astype(np.uint8)
    columns = dict[str, NDArray[Any]]()
    for each, names in (("coord", "x y z"), ("normal", "nx ny nz"), ("color", "red green blue")):
        columns |= dict(zip(names.split(), room[each].T, strict=True))
    comments = [f"label {number} {each}" for number, each in enumerate(ROOM_CLASSES)]
    path.parent.mkdir(exist_ok=True)
    write_ply(path, {**columns, "label": room["label"]}, comments=comments)
