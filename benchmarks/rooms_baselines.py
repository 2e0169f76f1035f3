"""How far single points of generated rooms go: their height alone, and nearest neighbours.

A voxel gets the class that is most frequent at its height in the training rooms, in steps of 5 cm;
or the class of most of its nearest neighbours among voxels of the training rooms, by colour, height
and the vertical part of the normal. Points of the test rooms get their voxel's class. The metrics
are those of a training. To print the figures for the rooms of ``data=rooms``:

    python benchmarks/rooms_baselines.py

Shapes: N voxels, C features, K classes, M neighbours.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch.nn import functional as F

from sparsepipe.data import GeneratedRooms, SceneDataModule
from sparsepipe.data.points import SPLITS, FloatArray, IntArray, Split
from sparsepipe.data.scenes.rooms import ROOM_CLASSES
from sparsepipe.data.scenes.scene import class_counts
from sparsepipe.models.metrics import confusion_of, ious_of

_SCALES = np.array([1.5, 1.5, 1.5, 1.0, 1.0], np.float32)
"""Weights of red, green, blue, the vertical part of the normal, and the height in metres."""
_CLASSES = len(ROOM_CLASSES)


def voxels_of(
    data: SceneDataModule, split: Split, *, per_room: int | None, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Features [N, C] and counts of points of each class [N, K] of all voxels, or some a room."""
    rooms, settings = data.samples(split), data.preprocessing().voxels
    features, counts = list[FloatArray](), list[FloatArray]()
    for index in range(len(rooms.files)):
        room = settings.prepare(rooms.read(index))
        coords_N3, feats_NC, rows_P = settings.voxelise(room)
        counts_NK = class_counts(
            rows_P, room.labels_P, num_voxels=len(coords_N3), num_classes=_CLASSES
        )
        kept = slice(None) if per_room is None else rng.permutation(len(coords_N3))[:per_room]
        features.append(feats_NC[kept][:, [0, 1, 2, 5, 6]] * _SCALES)
        counts.append(counts_NK[kept])
    return np.concatenate(features), np.concatenate(counts)


def by_height(
    train_NC: FloatArray, counts_NK: FloatArray, test_NC: FloatArray, *, step_m: float = 0.05
) -> IntArray:
    """The most frequent class at each test voxel's height, [N]."""
    lowest = train_NC[:, -1].min()
    train_N, test_N = (
        ((each[:, -1] - lowest) / step_m).astype(int) for each in (train_NC, test_NC)
    )
    slices_LK = np.zeros((int(train_N.max()) + 1, _CLASSES))
    np.add.at(slices_LK, train_N, counts_NK)
    found_N: IntArray = slices_LK.argmax(axis=1)[test_N.clip(0, len(slices_LK) - 1)]
    return found_N


def by_neighbours(
    train_NC: FloatArray, counts_NK: FloatArray, test_NC: FloatArray, *, neighbours: int
) -> IntArray:
    """The class of most of each test voxel's nearest training voxels, [N]."""
    _, nearest_NM = cKDTree(train_NC).query(test_NC, k=[*range(1, neighbours + 1)], workers=-1)
    classes_NM = counts_NK.argmax(axis=1)[nearest_NM]
    votes_NK = np.zeros((len(test_NC), _CLASSES), np.int16)
    for classes_N in classes_NM.T:
        votes_NK[np.arange(len(votes_NK)), classes_N] += 1
    found_N: IntArray = votes_NK.argmax(axis=1)
    return found_N


def report(found_N: NDArray[np.int64], counts_NK: FloatArray) -> list[str]:
    """Mean IoU, mean and total accuracy, and IoU of each class, in per cent."""
    guess_NK = F.one_hot(torch.from_numpy(found_N), _CLASSES).double()
    confusion_KK = confusion_of(guess_NK, torch.from_numpy(counts_NK))[:, :_CLASSES].double()
    ious_K, right_K = ious_of(confusion_KK), confusion_KK.diagonal()
    means = [ious_K.nanmean(), (right_K / confusion_KK.sum(1)).nanmean()]
    figures = [*means, right_K.sum() / confusion_KK.sum(), *ious_K]
    return [f"{100 * float(figure):.1f}" for figure in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="data directory (data)")
    parser.add_argument("--train-rooms", type=int, default=240)
    parser.add_argument("--test-rooms", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="seed of the rooms (0)")
    parser.add_argument("--voxel-size", type=float, default=0.1, help="metres (0.1)")
    parser.add_argument("--per-room", type=int, default=500, help="training voxels a room (500)")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[1, 15])
    options = parser.parse_args()
    counts = {f"{split}_rooms": getattr(options, f"{split}_rooms") for split in SPLITS}
    data = SceneDataModule(
        options.data / "rooms",
        source=partial(GeneratedRooms, seed=options.seed, **counts),
        cache_dir=options.data / "cache",
        voxel_size=options.voxel_size,
        features=("color", "normal", "height"),
    )
    rng = np.random.default_rng(options.seed)
    train_NC, train_NK = voxels_of(data, "train", per_room=None, rng=rng)
    fewer_NC, fewer_NK = voxels_of(data, "train", per_room=options.per_room, rng=rng)
    test_NC, test_NK = voxels_of(data, "test", per_room=None, rng=rng)
    columns = {"height": report(by_height(train_NC, train_NK, test_NC), test_NK)}
    for neighbours in options.neighbours:
        found_N = by_neighbours(fewer_NC, fewer_NK, test_NC, neighbours=neighbours)
        columns[f"nearest {neighbours}"] = report(found_N, test_NK)
    print(f"{len(fewer_NC)} of {len(train_NC)} training voxels are neighbours")
    print(f"{len(test_NC)} test voxels with {int(test_NK.sum())} points")
    print("| % | " + " | ".join(columns) + " |")
    print("|---|" + "--:|" * len(columns))
    names = ["mean IoU", "mean accuracy", "accuracy of points", *ROOM_CLASSES]
    for name, *figures in zip(names, *columns.values(), strict=True):
        print(f"| {name} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
