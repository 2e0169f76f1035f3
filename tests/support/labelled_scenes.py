"""Small rooms whose points have labels, and files of them, written byte by byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLASSES = ("floor", "wall", "table")
RAW = (10, 20, 40)
"""Labels of the classes in files."""
TRAINING = (
    *("data=scenes", "data.root=scenes", "data.voxel_size=0.2", "data.batch_size=2"),
    *("data.classes=[floor,wall,table]", "data.learning_map=map.yaml", "data.num_workers=0"),
    *("model=minkunet14", "model.width=0.0625", "parallel=single", "optim=adamw", "seed=2"),
    *("trainer.max_epochs=1", "task.gallery=0", "hardware.accelerator=cpu"),
)
ORIGIN = np.array([401_234.5, 5_123_456.25, 312.0])
"""Where the rooms stand: too far for positions in float32."""


def room(seed: int, *, points: int = 240) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Positions [P, 3] around the origin, and class numbers [P]."""
    rng = np.random.default_rng(seed)
    width, depth = rng.uniform(2.5, 4, 2)
    labels_P = np.arange(points) % 3
    points_P3 = rng.uniform(0, 1, (points, 3)) * [width, depth, 2]
    points_P3[labels_P == 0, 2] = 0
    points_P3[labels_P == 1, 1] = 0
    points_P3[labels_P == 2] = [1, 1, 0.7] + points_P3[labels_P == 2] * [0.3, 0.3, 0.02]
    return points_P3 + rng.normal(0, 0.005, (points, 3)), labels_P


def write_ply(path: Path, seed: int, *, values: tuple[int, ...] = RAW) -> None:
    """A text file with positions, colours and labels of a room far from the origin."""
    points_P3, labels_P = room(seed)
    kinds = ["double"] * 3 + ["uchar"] * 3 + ["int"]
    names = ["x", "y", "z", "red", "green", "blue", "label"]
    lines = [f"property {kind} {name}" for kind, name in zip(kinds, names, strict=True)]
    head = ["ply", "format ascii 1.0", f"element vertex {len(points_P3)}", *lines, "end_header"]
    rows = [
        f"{x!r} {y!r} {z!r} {60 * k} 128 {255 - 60 * k} {values[k]}"
        for (x, y, z), k in zip((points_P3 + ORIGIN).tolist(), labels_P.tolist(), strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *rows, ""]))


def write_scenes(root: Path) -> None:
    """Three rooms to train on and two to test on, and the map of their labels beside them."""
    for split, seeds in (("train", (0, 1, 2)), ("test", (3, 4))):
        for seed in seeds:
            write_ply(root / split / f"room_{seed}.ply", seed)
    lines = [f"{value}: {k}\n" for k, value in enumerate(RAW)]
    (root.parent / "map.yaml").write_text("".join(lines) + "1: -100\n")
