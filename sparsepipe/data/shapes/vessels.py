"""Vessels share their bodies; handles, spouts, lids and what grows in them tell them apart."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from sparsepipe.data.shapes.draw import between, chance, one_of
from sparsepipe.data.shapes.parts import (
    Part,
    ball,
    lathe,
    moved,
    prism,
    superellipse,
    tube,
    turned,
)

Profile: TypeAlias = list[tuple[float, float]]


def vase(rng: np.random.Generator) -> list[Part]:
    """A body and nothing else."""
    profile = _body(rng)
    return _vessel(rng, profile)


def mug(rng: np.random.Generator) -> list[Part]:
    """A body with one handle."""
    profile = _body(rng)
    return [*_vessel(rng, profile), _handle(rng, profile)]


def urn(rng: np.random.Generator) -> list[Part]:
    """A body with two handles."""
    profile = _body(rng)
    handle = _handle(rng, profile)
    return [*_vessel(rng, profile), handle, turned(handle, np.pi)]


def jug(rng: np.random.Generator) -> list[Part]:
    """A body with one handle and, opposite, a spout."""
    profile = _body(rng)
    return [*_vessel(rng, profile), _handle(rng, profile), _spout(rng, profile)]


def _body(rng: np.random.Generator) -> Profile:
    """(radius, height) from foot to rim: a cylinder, a cone, a belly, a waist or a tulip."""
    height = between(rng, 0.5, 1.2)
    foot, middle, neck, rim = {
        "cylinder": (0.4, 0.4, 0.4, 0.4),
        "cone": (0.28, 0.36, 0.43, 0.46),
        "belly": (0.28, 0.45, 0.3, 0.32),
        "waist": (0.4, 0.3, 0.32, 0.42),
        "tulip": (0.22, 0.42, 0.4, 0.46),
    }[one_of(rng, "cylinder", "cone", "belly", "waist", "tulip")]
    knots = np.array([foot, middle, neck, rim]) * rng.uniform(0.85, 1.15, 4)
    share = np.linspace(0, 1, 9)
    radii = np.interp(share, [0, between(rng, 0.35, 0.5), between(rng, 0.7, 0.85), 1], knots)
    radii[1:-1] = (radii[:-2] + 2 * radii[1:-1] + radii[2:]) / 4
    return [(float(r), float(z)) for r, z in zip(radii, share * height, strict=True)]


def _vessel(rng: np.random.Generator, profile: Profile) -> list[Part]:
    """The hollow body; sometimes under a lid, sometimes on a saucer or a tray."""
    parts = [_hollow(rng, profile)]
    if chance(rng, 0.25):
        parts += _lid(rng, profile)
    if chance(rng, 0.4):
        half_x, half_y = rng.uniform(0.4, 0.75, 2)
        if chance(rng, 0.5):
            half_y = half_x
        outline = superellipse(half_x, half_y, power=2.0 if half_x == half_y else 8.0)
        tray = prism(outline, -between(rng, 0.03, 0.08), 0.0)
        parts.append(moved(tray, (*rng.uniform(-0.15, 0.15, 2), 0.0)))
    return parts


def _hollow(rng: np.random.Generator, profile: Profile) -> Part:
    """The body with an inner wall and a floor."""
    wall = between(rng, 0.02, 0.05)
    inside = [(max(r - wall, wall / 2), max(z, wall)) for r, z in reversed(profile)]
    return lathe([(0.0, 0.0), *profile, *inside, (0.0, wall)])


def _radius_at(profile: Profile, height: float) -> float:
    radii, heights = np.array(profile).T
    return float(np.interp(height, heights, radii))


def _handle(rng: np.random.Generator, profile: Profile) -> Part:
    """A bow from low to high on the body, on the side of positive x."""
    height = profile[-1][1]
    low, high = between(rng, 0.15, 0.35) * height, between(rng, 0.7, 0.92) * height
    start, stop = _radius_at(profile, low), _radius_at(profile, high)
    angle = np.linspace(-np.pi / 2, np.pi / 2, 10)
    path = np.zeros((10, 3))
    bow = between(rng, 0.18, 0.36)
    path[:, 0] = np.linspace(start, stop, 10) - 0.03 + bow * np.cos(angle)
    path[:, 2] = (low + high) / 2 + (high - low) / 2 * np.sin(angle)
    return tube(path, between(rng, 0.06, 0.1))


def _spout(rng: np.random.Generator, profile: Profile) -> Part:
    """A tapering pipe that leaves the body on the side of negative x and rises."""
    height = profile[-1][1]
    low = between(rng, 0.3, 0.6) * height
    start, reach = _radius_at(profile, low), between(rng, 0.18, 0.36)
    angle = np.linspace(0.15, np.pi / 2 + 0.4, 7)
    path = np.zeros((7, 3))
    path[:, 0] = -start - reach + reach * np.cos(angle)
    path[:, 2] = low + (height * 1.02 - low) * np.sin(angle)
    return tube(path, between(rng, 0.08, 0.12))


def _lid(rng: np.random.Generator, profile: Profile) -> list[Part]:
    radius, height = profile[-1]
    rise, knob = between(rng, 0.05, 0.15), between(rng, 0.05, 0.09)
    cover = lathe([(radius, height), (radius * 0.7, height + rise * 0.7), (0.0, height + rise)])
    return [cover, ball((0, 0, height + rise + knob * 0.7), (knob, knob, knob))]
