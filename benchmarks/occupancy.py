"""What share of the voxels is occupied? Whole test splits, beside the paper's figures.

The embedded shapes with 4,096 points each, modelled and sampled on the spot, and the clouds of
an npz bundle with all their points; the grid spans each shape's own extent.

    python benchmarks/occupancy.py [--bundle "$MODELNET40_POINTS"]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sparsepipe.data import GeneratedShapes, NpzBundle, ShapeDataModule

PAPER_OCCUPANCY = {32: 0.076, 50: 0.026}
"""Mean share of occupied voxels on ModelNet40, as the SparsePipe paper prints it."""


def mean_occupancy(data: ShapeDataModule, resolution: int) -> float:
    """Mean share of occupied voxels over the test shapes."""
    voxels = sum(len(batch["input"]) for batch in data.test_dataloader())
    return voxels / len(data.samples("test")) / resolution**3


def report(
    name: str, source: Callable[..., Any], *, root: Path, cache: Path, points: int | None
) -> None:
    """Measure and print one test split at the paper's resolutions."""
    for resolution, printed in PAPER_OCCUPANCY.items():
        data = ShapeDataModule(
            root, source=source, cache_dir=cache, resolution=resolution, num_points=points
        )
        data.setup()
        clouds, occupied = data.samples("test"), mean_occupancy(data, resolution)
        voxels = occupied * resolution**3
        print(
            f"{name:8}  {len(clouds):11,d}  {points or clouds.points_per_shape:6,d}"
            f"  {resolution:2d}^3  {voxels:6,.0f}  {occupied:8.2%}  {printed:5.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test", type=int, default=52, help="test shapes of each class (52)")
    parser.add_argument("--bundle", type=Path, help="directory of train.npz and test.npz")
    options = parser.parse_args()
    print("data      test shapes  points  grid  voxels  occupied  paper")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cache = directory / "cache"
        shapes = partial(GeneratedShapes, train_per_class=1, test_per_class=options.test)
        report("shapes", shapes, root=directory / "shapes", cache=cache, points=4_096)
        if options.bundle is not None:
            report("bundle", NpzBundle, root=options.bundle, cache=cache, points=None)


if __name__ == "__main__":
    main()
