"""How well voxels of generated organs are labelled from their brightness, their place, or both.

A voxel gets the class that is most frequent in the training cases among voxels of its brightness
and place, in a smoothed histogram. Its place is that between the ends of the body, on each axis.
Volumes are prepared as in ``conf/data/organs.yaml``. To print the mean Dice coefficients over the
test cases of ``data=organs``:

    python benchmarks/organs_baselines.py

Shapes: N voxels, F features, K classes, S cases, X, Y, Z voxels on each axis.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from scipy.ndimage import gaussian_filter

from sparsepipe.data import GeneratedOrgans, VolumeDataModule
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, Split
from sparsepipe.data.volumes.organs import ORGAN_CLASSES

_FEATURES = {"brightness": [0], "place": [1, 2, 3], "both": [0, 1, 2, 3]}
_BINS = 32, 24, 24, 24
"""Steps of the brightness, and of the places along the three axes."""
_CLASSES = len(ORGAN_CLASSES)


def voxels_of(data: VolumeDataModule, split: Split) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields for each case the bins [F, N] and the labels [N] of its labelled voxels."""
    samples = data.samples(split)
    for index, sizes in enumerate(samples.sizes_S):
        whole = tuple(map(slice, sizes))
        value_XYZ = samples.read_input(index, whole)[0]
        places = list[FloatArray]()
        for axis, size in enumerate(sizes):
            others = tuple({0, 1, 2} - {axis})
            area = (value_XYZ > 0.02).sum(axis=others)
            ends = np.flatnonzero(area > 0.1 * area.max())[[0, -1]]
            places.append((np.arange(size) - ends[0]) / np.ptp(ends))
        features = value_XYZ, *np.meshgrid(*places, indexing="ij")
        label_N = samples.read_label(index, whole).ravel()
        bins_FN = np.stack(
            [
                (each.ravel() * bins).astype(np.int64).clip(0, bins - 1)
                for each, bins in zip(features, _BINS, strict=True)
            ]
        )
        yield bins_FN[:, label_N >= 0], label_N[label_N >= 0]


def dice_by(data: VolumeDataModule, features: list[int]) -> FloatArray:
    """Dice coefficients of the organs in each test case by a histogram of features, [S, K - 1]."""
    counts_K = np.zeros((_CLASSES, *(_BINS[each] for each in features)), np.float32)
    for bins_FN, label_N in voxels_of(data, "train"):
        np.add.at(counts_K, (label_N, *bins_FN[features]), 1)
    likeliest = np.stack([gaussian_filter(each, 1) for each in counts_K]).argmax(axis=0)
    found = list[list[float]]()
    for bins_FN, label_N in voxels_of(data, "test"):
        guess_N = likeliest[tuple(bins_FN[features])]
        masks = [(guess_N == each, label_N == each) for each in range(1, _CLASSES)]  # none is empty
        found.append([2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in masks])
    return np.array(found, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="data directory (data)")
    parser.add_argument("--train-cases", type=int, default=48)
    parser.add_argument("--test-cases", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (0)")
    parser.add_argument("--spacing", type=float, help="side of a voxel, mm (as configured)")
    options = parser.parse_args()
    counts = {f"{split}_cases": getattr(options, f"{split}_cases") for split in SPLITS}
    group = Path(__file__).parents[1] / "conf" / "data" / "organs.yaml"
    configured = yaml.safe_load(group.read_text())["source"]
    reading = {name: configured[name] for name in ("orientation", "spacing", "intensity")}
    if options.spacing:
        reading["spacing"] = [options.spacing] * 3
    data = VolumeDataModule(
        options.data / "organs",
        source=partial(GeneratedOrgans, **{"seed": options.seed, **counts, **reading}),
        cache_dir=options.data / "cache",
        labels="voxel",
    )
    columns = {name: 100 * dice_by(data, features) for name, features in _FEATURES.items()}
    print("| Dice, % | " + " | ".join(columns) + " |")
    print("|---|" + "--:|" * len(columns))
    print("| mean | " + " | ".join(f"{each.mean():.1f}" for each in columns.values()) + " |")
    for number, name in enumerate(ORGAN_CLASSES[1:]):
        figures = (f"{each[:, number].mean():.1f}" for each in columns.values())
        print(f"| {name} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
