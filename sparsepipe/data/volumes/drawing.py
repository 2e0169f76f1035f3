"""Drawing of signals, images and volumes: overlapping objects of four textures, with noise.

Shapes: D dimensions of a sample, at most three. A piece is a range of its rows, which are the
positions in its first dimension.

A sample has one object of each texture. The largest one lies in front, and its texture is the label
of the sample. Textures have mean 0 and the same variance, and brightness and contrast of an object
are random. So neither means nor variances of a sample, or of its parts, reveal the label; the local
pattern does, which a small convolutional network learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.points import ExactArray, FloatArray

VERSION = 1
"""Increased with any change to the samples."""
_WAVELENGTHS = {"fine": (3.0,), "coarse": (9.0,), "woven": (3.0, 9.0), "spiky": (6.0,)}
"""Wavelengths of each texture's waves, in voxels and so the same in samples of any size."""
TEXTURES = tuple(_WAVELENGTHS)
MIDDLE, STEP = 128, 1 / 32
"""A stored byte ``b`` is the value ``(b - MIDDLE) * STEP``."""

_NOISE = 0.4
_ORDERS = (1.0, 2.0, math.inf)
"""Objects are balls in one of these norms: diamonds, ellipsoids and boxes."""


@dataclass(frozen=True, slots=True)
class DrawnObject:
    """One object of a sample.

    Attributes:
        texture: index in ``TEXTURES``.
        center_D: position of its middle in the sample, in voxels.
        frame_DD: matrix that maps offsets from the middle to a frame where it is a unit ball.
        order: order of the norm that defines this ball.
        reach_D: on each axis, a bound on the distance of its voxels from the middle, in voxels.
        waves_2D: two unit vectors, the directions of the texture's waves; orthogonal unless D is 1.
        stretch: factor of the texture's wavelengths.
    """

    texture: int
    center_D: ExactArray
    frame_DD: ExactArray
    order: float
    reach_D: ExactArray
    waves_2D: ExactArray
    stretch: float


def draw_objects(
    label: int, sizes: Sequence[int], rng: np.random.Generator
) -> tuple[DrawnObject, ...]:
    """Draws a sample's objects from back to front; the last, the largest, has texture ``label``."""
    others = [texture for texture in range(len(TEXTURES)) if texture != label]
    small = [
        _draw_object(int(texture), sizes, rng, radius=(0.12, 0.2), middle=(0.1, 0.9))
        for texture in rng.permutation(others)
    ]
    return (*small, _draw_object(label, sizes, rng, radius=(0.3, 0.36), middle=(0.35, 0.65)))


def _draw_object(
    texture: int,
    sizes: Sequence[int],
    rng: np.random.Generator,
    *,
    radius: tuple[float, float],
    middle: tuple[float, float],
) -> DrawnObject:
    dimensions = len(sizes)
    order = float(rng.choice(_ORDERS))
    sides_D = np.asarray(sizes, np.float64)
    # Every kind of object has the volume of the ellipsoid of this radius.
    volume = {1.0: 2**dimensions / math.factorial(dimensions), math.inf: 2.0**dimensions}
    euclidean = math.pi ** (dimensions / 2) / math.gamma(dimensions / 2 + 1)
    equal = float((euclidean / volume.get(order, euclidean)) ** (1 / dimensions))
    radii_D = rng.uniform(*radius) * equal * sides_D
    stretch_D = np.exp(rng.uniform(-0.2, 0.2, dimensions))
    stretch_D /= stretch_D.prod() ** (1 / dimensions)
    turn_DD = _rotation(dimensions, rng)
    corner = math.sqrt(dimensions) if order == math.inf else 1.0
    waves_DD = _rotation(dimensions, rng)
    return DrawnObject(
        texture=texture,
        center_D=rng.uniform(*middle, dimensions) * (sides_D - 1),
        frame_DD=turn_DD / stretch_D[:, None] / radii_D,
        order=order,
        reach_D=radii_D * stretch_D.max() * corner,
        waves_2D=waves_DD[[0, min(1, dimensions - 1)]],
        stretch=float(rng.uniform(0.9, 1.1)),
    )


def _rotation(dimensions: int, rng: np.random.Generator) -> ExactArray:
    turn_DD, _ = np.linalg.qr(rng.standard_normal((dimensions, dimensions)))
    return np.asarray(turn_DD, np.float64)


def draw_labels(
    objects: Sequence[DrawnObject], sizes: Sequence[int], rows: slice
) -> NDArray[np.uint8]:
    """Returns voxel labels of the piece ``rows``: 0 outside objects, else 1 + the front texture."""
    labels = np.zeros((rows.stop - rows.start, *sizes[1:]), np.uint8)
    for each in objects:
        inner, apart = _box(each, sizes, rows)
        labels[inner][_covered(each, apart)] = each.texture + 1
    return labels


def paint_channel(
    objects: Sequence[DrawnObject],
    sizes: Sequence[int],
    rng: np.random.Generator,
    pieces: Sequence[slice],
) -> Iterator[NDArray[np.uint8]]:
    """Yields the stored bytes of one channel of a sample: for each piece, [rows, *sizes[1:]]."""
    count = len(objects)
    contrasts, brightness = rng.uniform(0.7, 1.3, count), rng.uniform(-0.5, 0.5, count)
    phases_N2 = rng.uniform(0, 2 * np.pi, (count, 2))
    # A wave of brightness, about as long as the sample.
    light_D = _rotation(len(sizes), rng)[0] / (1.5 * np.asarray(sizes, np.float64))
    light_phase, light = rng.uniform(0, 2 * np.pi), rng.uniform(0.2, 0.6)
    for rows in pieces:
        shape = (rows.stop - rows.start, *sizes[1:])
        values = np.zeros(shape, np.float32)
        for number, each in enumerate(objects):
            inner, apart = _box(each, sizes, rows)
            own = contrasts[number] * _texture(each, apart, phases_N2[number])
            own += brightness[number]
            np.copyto(values[inner], own, where=_covered(each, apart))
        places = [
            np.arange(each.start, each.stop, dtype=np.float64)
            for each in (rows, *(slice(0, size) for size in sizes[1:]))
        ]
        values += light * np.sin(_linear_form(places, 2 * np.pi * light_D, light_phase))
        values += np.float32(_NOISE) * rng.standard_normal(shape, np.float32)
        values *= np.float32(1 / STEP)
        values += np.float32(MIDDLE)
        np.rint(values, out=values)
        yield np.clip(values, 0, 255, out=values).astype(np.uint8)


def _box(
    each: DrawnObject, sizes: Sequence[int], rows: slice
) -> tuple[tuple[slice, ...], tuple[ExactArray, ...]]:
    """Returns the box of a piece that an object may reach: its slices, and its voxels' positions.

    Slices are relative to the piece, positions along each dimension to the object's middle.
    """
    firsts = np.ceil(each.center_D - each.reach_D).astype(int)
    ends = np.floor(each.center_D + each.reach_D).astype(int) + 1
    inner: list[slice] = []
    apart: list[ExactArray] = []
    for axis, size in enumerate(sizes):
        held = rows if axis == 0 else slice(0, size)
        first = min(max(int(firsts[axis]), held.start), held.stop)
        end = max(min(int(ends[axis]), held.stop), first)
        inner.append(slice(first - held.start, end - held.start))
        apart.append(np.arange(first, end, dtype=np.float64) - each.center_D[axis])
    return tuple(inner), tuple(apart)


def _covered(each: DrawnObject, apart: tuple[ExactArray, ...]) -> NDArray[np.bool_]:
    """Whether each voxel of the box with positions ``apart`` belongs to the object."""
    combine: Callable[..., Any] = np.maximum if each.order == math.inf else np.add
    total: FloatArray | None = None
    for row_D in each.frame_DD:
        form = np.abs(_linear_form(apart, row_D))
        if each.order == 2:
            form *= form
        total = form if total is None else combine(total, form, out=total)
    assert total is not None
    return total <= 1


def _texture(each: DrawnObject, apart: tuple[ExactArray, ...], phases_2: ExactArray) -> FloatArray:
    """Values of the object's texture, of mean 0 and variance 1, at positions ``apart`` of a box."""
    phases: list[FloatArray] = []
    for wave, wavelength in enumerate(_WAVELENGTHS[TEXTURES[each.texture]]):
        turns_D = 2 * np.pi / (wavelength * each.stretch) * each.waves_2D[wave]
        phases.append(_linear_form(apart, turns_D, phases_2[wave], turning=True))
    match TEXTURES[each.texture]:
        case "fine" | "coarse":
            return np.float32(math.sqrt(2)) * np.sin(phases[0])
        case "woven":
            return np.sin(phases[0]) + np.sin(phases[1])
        case _:
            # Mean and variance of (1/2 + cos/2)^4 are C(8,4)/2^8 and C(16,8)/2^16 - mean^2.
            mean = math.comb(8, 4) / 2**8
            deviation = math.sqrt(math.comb(16, 8) / 2**16 - mean**2)
            spikes = (np.float32(0.5) + np.float32(0.5) * np.cos(phases[0])) ** 4
            return (spikes - np.float32(mean)) / np.float32(deviation)


def _linear_form(
    places: Sequence[ExactArray],
    factors_D: ExactArray,
    start: float = 0.0,
    *,
    turning: bool = False,
) -> FloatArray:
    """Returns ``start + sum(factor * place)``, summed over dimensions, at each voxel of a box.

    ``places``: the box's positions along each dimension; ``turning``: takes terms modulo 2 pi.
    """
    total: FloatArray = np.full((1,) * len(places), start, np.float32)
    for axis, place in enumerate(places):
        term = place * factors_D[axis]
        if turning:
            term %= 2 * np.pi
        shape = [-1 if other == axis else 1 for other in range(len(places))]
        total = total + term.astype(np.float32).reshape(shape)
    return total
