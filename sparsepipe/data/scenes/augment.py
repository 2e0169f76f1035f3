"""Crops and augmentation of training scenes.

Shapes: P points, 3 axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.random import Generator
from pydantic import Field
from scipy.ndimage import map_coordinates, uniform_filter1d

from sparsepipe.data.augment import Augment, Axis
from sparsepipe.data.points import FloatArray
from sparsepipe.data.scenes.scene import Scene, bounds_of
from sparsepipe.errors import ConfigError
from sparsepipe.utils.arguments import checked

Metres = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SceneAugment:
    """Settings of the augmentation of scenes; the defaults change nothing.

    Heights above the floor (the feature ``height``) stay those of the scene as it was.

    Args:
        enabled: whether the other settings have any effect.
        rotate_deg: largest rotation about the vertical axis in either direction, in degrees.
        scale: smallest and largest factor of the random scale.
        flip: probability of mirroring along each horizontal axis.
        elastic: pairs of a distance and a strength in metres. Each moves the points by noise, which
            is drawn at a grid with that distance, smoothed, and multiplied by that strength.
        jitter: standard deviation of the noise on each coordinate, in metres.
        jitter_clip: largest noise on a coordinate, in metres.
        dropout: largest share of points dropped at random; each access draws a share up to it.
        color_contrast: probability of stretching each channel to the full range, which is blended
            with the colours as they are.
        color_shift: largest shift of each channel of the colour, as a share of the full range.
        color_jitter: standard deviation of the noise on the colour of each point.
        color_drop: probability that all colours are 0.
        mix: probability that another training scene is added, as in Mix3D (arXiv 2110.02210).
    """

    enabled: bool = True
    rotate_deg: Annotated[float, Field(ge=0, le=180)] = 0.0
    scale: Sequence[float] = (1.0, 1.0)
    flip: _Share = 0.0
    elastic: Sequence[Sequence[float]] = ()
    jitter: Metres = 0.0
    jitter_clip: Metres = 0.02
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    color_contrast: _Share = 0.0
    color_shift: _Share = 0.0
    color_jitter: _Share = 0.0
    color_drop: _Share = 0.0
    mix: _Share = 0.0

    def __post_init__(self) -> None:
        for name, pair in (("scale", self.scale), *(("elastic", each) for each in self.elastic)):
            is_pair = len(pair) == 2 and min(pair) > 0 and max(pair) < np.inf
            if not is_pair or (name == "scale" and pair[0] > pair[1]):
                raise ConfigError(
                    f"data.augment.{name} has {list(pair)}, not a pair of positive numbers",
                    remedy="set scale to the smallest and the largest factor, elastic to a list of "
                    "pairs of metres, such as [[0.2,0.4],[0.8,1.6]]",
                )

    def __call__(self, scene: Scene, rng: Generator, *, up_axis: Axis) -> Scene:
        """Returns a scene that was changed at random, with the middle of its floor at 0."""
        if not self.enabled:
            return scene
        if self.dropout:
            kept_P = rng.random(len(scene)) >= rng.uniform(0, self.dropout)
            scene = scene.take(kept_P) if kept_P.any() else scene
        up = "xyz".index(up_axis)
        low_3, high_3 = bounds_of(scene.coords_P3)
        middle_3 = (low_3 + high_3) / np.float32(2)
        middle_3[up] = low_3[up]
        pose_33 = Augment(rotate_deg=self.rotate_deg, flip=self.flip).pose(rng, up_axis=up_axis)
        factor = np.float32(rng.uniform(self.scale[0], self.scale[1]))
        coords_P3 = (scene.coords_P3 - middle_3) @ (pose_33 * factor)
        for distance, strength in self.elastic:
            coords_P3 = _elastic(coords_P3, rng, distance=distance, strength=strength)
        if self.jitter:
            noise_P3 = rng.standard_normal(coords_P3.shape, np.float32) * np.float32(self.jitter)
            coords_P3 += noise_P3.clip(-self.jitter_clip, self.jitter_clip)
        features = dict(scene.features)
        if "normal" in features:
            features["normal"] = features["normal"] @ pose_33
        if "color" in features:
            features["color"] = self._colored(features["color"], rng)
        return replace(scene, coords_P3=coords_P3, features=features)

    def _colored(self, color_P3: FloatArray, rng: Generator) -> FloatArray:
        if rng.random() < self.color_contrast:
            low_3, high_3 = bounds_of(color_P3)
            blend = np.float32(rng.random())
            stretched_P3 = (color_P3 - low_3) / np.maximum(high_3 - low_3, np.float32(1 / 255))
            color_P3 = blend * stretched_P3 + (1 - blend) * color_P3
        if self.color_shift:
            moved_3 = rng.uniform(-self.color_shift, self.color_shift, 3).astype(np.float32)
            color_P3 = (color_P3 + moved_3).clip(0, 1)
        if self.color_jitter:
            noise_P3 = rng.standard_normal(color_P3.shape, np.float32)
            color_P3 = (color_P3 + noise_P3 * np.float32(self.color_jitter)).clip(0, 1)
        return np.zeros_like(color_P3) if rng.random() < self.color_drop else color_P3


def crop(
    scene: Scene, rng: Generator, *, up_axis: Axis, points: int | None, size: float | None
) -> Scene:
    """Returns the part of a scene around a random point.

    Args:
        scene: the scene.
        rng: draws the point.
        up_axis: vertical axis, along which a box has no limits.
        points: largest number of points, the nearest ones; None: no limit.
        size: horizontal sides of a box in metres; None: no box.
    """
    if size is not None:
        sides = [axis for axis in range(3) if axis != "xyz".index(up_axis)]
        away_P2 = scene.coords_P3[:, sides] - scene.coords_P3[rng.integers(len(scene)), sides]
        scene = scene.take(np.flatnonzero((np.abs(away_P2) <= size / 2).all(axis=1)))
    if points is None or len(scene) <= points:
        return scene
    away_P3 = scene.coords_P3 - scene.coords_P3[rng.integers(len(scene))]
    nearest = np.argpartition(np.square(away_P3).sum(axis=1), points - 1)[:points]
    return scene.take(np.sort(nearest))


def mixed(scene: Scene, other: Scene) -> Scene:
    """Returns the points of two scenes, with the features that both have."""
    names = [name for name in scene.features if name in other.features]
    labels = [each.labels_P for each in (scene, other) if each.labels_P is not None]
    return replace(
        scene,
        coords_P3=np.concatenate([scene.coords_P3, other.coords_P3]),
        features={n: np.concatenate([scene.features[n], other.features[n]]) for n in names},
        labels_P=np.concatenate(labels) if len(labels) == 2 else None,
    )


def _elastic(
    coords_P3: FloatArray, rng: Generator, *, distance: float, strength: float
) -> FloatArray:
    """Moves points by smooth noise, as in the augmentation of MinkowskiEngine's examples."""
    low_3, high_3 = bounds_of(coords_P3)
    sizes = ((high_3 - low_3) // distance).astype(int) + 3
    noise = rng.standard_normal((3, *sizes), np.float32)
    for axis in (1, 2, 3) * 2:
        noise = uniform_filter1d(noise, 3, axis=axis, mode="constant")
    places_3P = (coords_P3 - low_3).T / np.float32(distance) + 1
    moved_3P = [map_coordinates(each, places_3P, order=1, mode="nearest") for each in noise]
    return coords_P3 + np.stack(moved_3P, axis=1).astype(np.float32) * np.float32(strength)
