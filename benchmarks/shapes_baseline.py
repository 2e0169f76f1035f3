"""How far gross form alone goes: a nearest neighbour on coarse occupancy grids.

Points are drawn by area from every mesh of a tree in ModelNet's layout, put into a grid that
spans the shape, and each test shape takes the class of the training shape whose grid differs
in the fewest voxels. To print the figures for the embedded shapes in their full size:

    python benchmarks/shapes_baseline.py --generate /tmp/shapes

Shapes: S shapes, V voxels of a grid, T training shapes, C classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import trimesh
from numpy.typing import NDArray

from sparsepipe.data.formats.off import read_off
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.voxels import Span, grid_box, occupancy, voxelise
from sparsepipe.utils.host import usable_cores


def grid_of(path: Path, *, points: int, resolution: int, span: Span) -> NDArray[np.bool_]:
    """Occupied voxels [V] of one mesh; the draw of points is seeded by the file's name."""
    seed = np.random.default_rng(list(path.name.encode())).integers(2**31)
    cloud, _ = trimesh.sample.sample_surface(read_off(path), points, seed=int(seed))
    cloud = cloud.astype(np.float32)
    center = cloud.mean(axis=0)
    radius = float(np.linalg.norm(cloud - center, axis=1).max())
    low, high = cloud.min(axis=0), cloud.max(axis=0)
    middle, half = grid_box(low, high, center, radius, span=span)
    sites = voxelise((cloud - middle) / half, resolution=resolution)
    return occupancy(sites, resolution=resolution).ravel() > 0


def nearest_labels(
    train_TV: NDArray[np.bool_], labels_T: NDArray[np.int64], test_SV: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Class of the training grid that differs in the fewest voxels; the first of equals."""
    train = train_TV.astype(np.float32)
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b; |b|^2 is the same for all candidates.
    distance = train.sum(axis=1) - 2 * (test_SV.astype(np.float32) @ train.T)
    found_S: NDArray[np.int64] = labels_T[distance.argmin(axis=1)]
    return found_S


def evaluate(
    root: Path, classes: Sequence[str], *, points: int, resolution: int, span: Span, workers: int
) -> NDArray[np.float64]:
    """Share of test shapes with the right nearest neighbour, by class [C]."""
    grid = partial(grid_of, points=points, resolution=resolution, span=span)
    grids, labels = {}, {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for split in ("train", "test"):
            files = [sorted((root / name / split).glob("*.off")) for name in classes]
            everything = [path for paths in files for path in paths]
            grids[split] = np.stack(list(pool.map(grid, everything, chunksize=16)))
            labels[split] = np.repeat(np.arange(len(classes)), [len(paths) for paths in files])
    found_S = nearest_labels(grids["train"], labels["train"], grids["test"])
    right_S = found_S == labels["test"]
    print(f"shapes          {len(labels['train'])} train, {len(labels['test'])} test")
    print(f"occupied        {grids['test'].mean():.1%} of voxels on average (test)")
    print(f"accuracy        {right_S.mean():.2%}")
    return np.array([right_S[labels["test"] == label].mean() for label in range(len(classes))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("root", type=Path, help="tree of OFF meshes: <class>/{train,test}/*.off")
    parser.add_argument(
        "--generate", action="store_true", help="first write the embedded shapes in full size"
    )
    parser.add_argument("--resolution", type=int, default=12, help="voxels a side (12)")
    parser.add_argument("--points", type=int, default=4096, help="points a shape (4096)")
    parser.add_argument(
        "--span",
        choices=["extent", "cube", "sphere"],
        default="extent",
        help="what the grid spans: the shape's own extent on each axis (default) or a cube",
    )
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes")
    options = parser.parse_args()
    if options.generate:
        generate_shapes(
            options.root, train_per_class=200, test_per_class=52, seed=0, workers=options.workers
        )
    classes = sorted(path.name for path in options.root.iterdir() if path.is_dir())
    print(f"nearest neighbour on {options.resolution}^3 occupancy, {options.points} points,")
    print(f"grid over the shape's {options.span}: {options.root}")
    share_C = evaluate(
        options.root,
        classes,
        points=options.points,
        resolution=options.resolution,
        span=options.span,
        workers=options.workers,
    )
    for name, share in zip(classes, share_C, strict=True):
        print(f"  {name:<14}{share:.1%}")


if __name__ == "__main__":
    main()
