"""Generated organs: scans of bodies whose voxels have labels of five organs, as NIfTI files.

Sizes, spacings and orientations of the scans differ, and a third of the training scans are labelled
on one side of a plane only. Organs are as bright as each other, and as bowels and lesions, which
have no label; the kidneys differ in their side. ``benchmarks/organs_baselines.py`` measures how
well single voxels can be labelled from their brightness, their place, or both.

Lengths are in millimetres. Bodies are described in the frame of a mean body, along whose axes each
body is stretched: x points to its right, y to its front and z to its head, as in RAS+.
Shapes: X, Y, Z voxels; N points of a line.
"""

from __future__ import annotations

import gzip
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from sparsepipe.data.cache import CacheSettings, write_missing
from sparsepipe.data.files import explaining_file
from sparsepipe.data.points import SPLITS, ExactArray, Split
from sparsepipe.data.volumes.datamodule import Labels
from sparsepipe.data.volumes.volume_files import Entries, VolumeFiles
from sparsepipe.utils.arguments import Count, Seed, checked
from sparsepipe.utils.files import expanded, write_bytes_atomic

ORGAN_CLASSES = ("background", "liver", "spleen", "right_kidney", "left_kidney", "vessels")
"""Names of the classes, indexed by the labels."""
VERSION = 1
"""Increased with any change to a case; part of the folder's name."""
_IGNORED = 255
"""Label of voxels that nobody has labelled."""


class _Body:
    """A body while it is painted on the grid of its scan, which is slightly oblique to it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.sizes_3, self.affine_44 = rng, rng.integers(72, 129, 3), np.eye(4)
        spacing_3 = rng.uniform((274, 194, 225), (300, 215, 246)) / self.sizes_3
        turned_33 = Rotation.from_rotvec(rng.normal(0, 0.08, 3)).as_matrix()
        stretch_3 = rng.uniform(0.87, 1.13, 3)
        self.affine_44[:3, :3] = turned_33 * spacing_3 * stretch_3
        self.affine_44[:3, 3] = rng.uniform(-300, 0, 3)
        self.step_33 = self.affine_44[:3, :3] / stretch_3[:, None]  # to the frame of a mean body
        self.label_XYZ = np.zeros(self.sizes_3, np.uint8)
        self.relief_XYZ = 0.09 * (self.wave(30, 70) + self.wave(30, 70) + self.wave(30, 70))
        self.value_XYZ = np.full(self.sizes_3, -1000, np.float32)

    def wave(self, shortest: float, longest: float) -> ExactArray:
        """A sine of any direction and phase and of a wavelength between these, [X, Y, Z]."""
        along_3, length = self.rng.normal(size=3), self.rng.uniform(shortest, longest)
        step_3 = along_3 / np.linalg.norm(along_3) * 2 * np.pi / length @ self.step_33
        phases_XYZ = np.tensordot(step_3, np.indices(self.label_XYZ.shape), 1)
        return np.sin(phases_XYZ + self.rng.uniform(0, 2 * np.pi))

    def near(self, *point: float, spread: float = 10.0) -> ExactArray:
        """A random point around another."""
        return np.array(point) + self.rng.normal(0, spread, 3)

    def paint(
        self, name: str, value: float, line: ArrayLike, radii: ArrayLike, *, turn: float = 0.2
    ) -> None:
        """Gives the voxels of an uneven ellipsoid, moved along a line, a label and a value."""
        radii_3 = np.broadcast_to(radii, 3)
        turned_33 = Rotation.from_rotvec(self.rng.normal(0, turn, 3)).as_matrix()
        ball_33 = turned_33 / radii_3[:, None] @ self.step_33  # from voxels to a unit ball
        line_N3 = np.atleast_2d(line) @ np.linalg.inv(self.step_33).T + (self.sizes_3 - 1) / 2
        reach_3 = 1.3 * radii_3.max() / np.diag(self.step_33)
        for ends_23 in map(np.stack, pairwise([line_N3[0], *line_N3])):
            ranges_23 = [ends_23.min(axis=0) - reach_3, ends_23.max(axis=0) + reach_3 + 1]
            box = tuple(map(slice, *np.clip(ranges_23, 0, self.sizes_3).astype(int)))
            away_3XYZ = np.tensordot(ball_33, np.mgrid[box] - ends_23[0, :, None, None, None], 1)
            along_3 = ball_33 @ (ends_23[1] - ends_23[0])
            share_XYZ = np.tensordot(along_3 / max(along_3 @ along_3, 1e-6), away_3XYZ, 1)
            away_3XYZ -= np.multiply.outer(along_3, share_XYZ.clip(0, 1))
            height_XYZ = self.relief_XYZ[box] * min(1, 40 / radii_3.max())
            inside = (away_3XYZ**2).sum(axis=0) < 1 + height_XYZ
            self.label_XYZ[box][inside] = ORGAN_CLASSES.index(name)
            self.value_XYZ[box][inside] = value


def _paint_all(body: _Body) -> None:
    """Paints the wall of the body, bowels and lesions, then organs and vessels."""
    rng, near, paint = body.rng, body.near, body.paint
    lows, gains = np.array([[-60, 55, 60, 50, 45, 50], [0, 10, 50, 75, 110, 120]])
    drawn = rng.normal(lows + gains * rng.uniform(0.1, 1), 10).tolist()  # by contrast medium
    fat, muscle, liver, spleen, kidney, vessel = drawn
    wall_3 = np.array([133, 96, 246])
    paint("background", muscle, (0, 0, 0), wall_3, turn=0)
    paint("background", fat, (0, 0, 0), wall_3 - rng.uniform(12, 30), turn=0)
    for number in range(rng.integers(20, 32)):  # bowels, and each third a lesion
        points, thickest = (1, 20) if number % 3 == 0 else (4, 15)
        line_N3 = rng.uniform((-60, -40, -90), (60, 40, 80)) + rng.uniform(-30, 30, (points, 3))
        value = rng.choice(drawn[2:]) + rng.normal(0, 8)
        paint("background", value, line_N3, rng.uniform(8, thickest))

    spleen_23 = near(-74, -18, 41) + np.array([[0, -7, 15], [0, 4, -15]])
    paint("spleen", spleen, spleen_23, rng.uniform(0.8, 1.2, 3) * (17, 27, 26))
    hilums = list[ExactArray]()
    for side, name in ((1, "right_kidney"), (-1, "left_kidney")):
        middle_3 = near(side * 48, -30, -15 - 5 * side)
        paint(name, kidney, middle_3, rng.uniform(0.8, 1.2, 3) * (26, 23, 46))
        hilums.append(middle_3 - (side * 22, 0, 0))
    lobe_3, radii_3 = near(49, 7, 44), rng.uniform(0.85, 1.15, 3) * (56, 49, 53)
    paint("liver", liver, lobe_3, radii_3)
    paint("liver", liver, [lobe_3, near(-5, 25, 46)], radii_3 / 2)

    gate_3 = lobe_3 - (20, 4, 8)
    aorta, cava = ([near(x, -25, z, spread=4) for z in (133, 41, -51)] for x in (-10, 14))
    ends = [(aorta[2], near(x, -7, -133)) for x in (-40, 40)]
    ends += [(aorta[1], spleen_23[1]), (aorta[1], hilums[1]), (cava[1], hilums[0])]
    ends += [(cava[1], gate_3), *((gate_3, near(*lobe_3, spread=25)) for _ in range(3))]
    branches = [[start, near(*(start + end) / 2), end] for start, end in ends]
    for line, radius in ((aorta, 12), (cava, 13), *((line, 8) for line in branches)):
        paint("vessels", vessel, line, radius * rng.uniform(0.85, 1.15))


def make_case(rng: np.random.Generator) -> tuple[NDArray[np.int16], NDArray[np.uint8], ExactArray]:
    """Scans a body.

    Returns values in Hounsfield units and labels, both [X, Y, Z], and the affine [4, 4] from
    indices of voxels to world coordinates in millimetres; the axes of the arrays point right, front
    and up, to within some degrees.
    """
    body = _Body(rng)
    _paint_all(body)
    scanned = gaussian_filter(body.value_XYZ, 0.4)  # voxels
    scanned += rng.uniform(5, 20) * body.wave(200, 500)  # brightness is uneven
    scanned += rng.normal(0, rng.uniform(15, 40), body.sizes_3)
    return np.rint(scanned).astype(np.int16), body.label_XYZ, body.affine_44


class GeneratedOrgans(VolumeFiles):
    """Source: generated scans of organs, as ``.nii.gz`` files in the folders of ``VolumeFiles``.

    A case depends only on the seed, its split and its number. Files that are missing are written.

    Args:
        root: directory to write to; created if it is missing.
        labels: what has a label, each ``voxel``.
        cache: settings of the cache that keeps prepared files.
        train_cases: number of training cases.
        test_cases: number of test cases.
        seed: seed of the cases.
        reading: further arguments of ``VolumeFiles``, such as ``orientation`` and ``spacing``.
    """

    @checked
    def __init__(
        self,
        root: Path | str,
        *,
        labels: Labels,
        cache: CacheSettings,
        train_cases: Count = 48,
        test_cases: Count = 16,
        seed: Seed = 0,
        **reading: Any,
    ) -> None:
        self._folder = expanded(root).absolute() / f"v{VERSION}_seed{seed}"
        reading = {"classes": ORGAN_CLASSES, "ignore": _IGNORED, **reading}
        super().__init__(self._folder, labels=labels, cache=cache, **reading)
        self._seed = seed
        self._cases: dict[Split, int] = {"train": train_cases, "test": test_cases}

    @cached_property
    def _listing(self) -> tuple[tuple[str, ...], Entries]:
        missing = [
            name
            for split, count in self._cases.items()
            for name in (f"{split}/case_{number:04d}.nii.gz" for number in range(1, count + 1))
            if not all((self._folder / kind / name).is_file() for kind in ("inputs", "labels"))
        ]
        write, cache = partial(_write_case, self._folder, self._seed), self._cache
        write_missing(self._folder, missing, write, cache=cache, per_worker=16, what="organs")
        classes, entries = super()._listing
        return classes, {split: entries[split][:count] for split, count in self._cases.items()}


def _write_case(root: Path, seed: int, name: str) -> None:
    """Writes the input and the labels of a case, both in the same one of 48 orientations."""
    with explaining_file(root / name, what="cannot be written", extra="volumes", remedy=""):
        nibabel = import_module("nibabel")
    split, number = name.removesuffix(".nii.gz").split("/case_")
    rng = np.random.default_rng([seed, SPLITS.index(split), int(number)])
    value_XYZ, label_XYZ, affine_44 = make_case(rng)
    if split == "train" and int(number) % 3 == 0:
        cut = int(label_XYZ.shape[2] * rng.uniform(0.3, 0.7))
        label_XYZ[..., slice(cut) if rng.random() < 0.5 else slice(cut, None)] = _IGNORED
    axes_32 = np.column_stack([rng.permutation(3), rng.choice([-1, 1], 3)])
    for path, values in ((root / "inputs" / name, value_XYZ), (root / "labels" / name, label_XYZ)):
        image = nibabel.Nifti1Image(values, affine_44).as_reoriented(axes_32)
        write_bytes_atomic(path, gzip.compress(image.to_bytes(), 1, mtime=0))
