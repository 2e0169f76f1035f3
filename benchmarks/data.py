"""Is reading data ever what training waits for? Loader, training step and cache side by side.

On the embedded shapes: meshes a second of the cache build; mean occupancy with 4,096 points
beside the paper's; then, at 32^3 and 50^3, shapes a second that one process reads from the
cache (drawing, augmenting, voxelising, collating), and shapes a second that a training step
of sparse VGG16-BN in full width consumes on this machine.

    python benchmarks/data.py

Only the loader, in turn with that of another version, whose checkout is in DIR:

    python benchmarks/data.py --beside DIR --batch-size 64 --workers 0

Shapes: B shapes in a batch.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from occupancy import PAPER_OCCUPANCY, mean_occupancy
from torch import nn

from sparsepipe.data import Augment, GeneratedShapes, ShapeDataModule
from sparsepipe.data.dataloaders import default_workers
from sparsepipe.models import sparse_vgg16_bn
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import keep_freed_memory

WARM_UP_STEPS = 1

GOAL = 3
"""How far the loader should be ahead of training."""
TURNS = 3
"""How often two versions' loaders are measured, one after the other."""


def open_data(options: argparse.Namespace, directory: Path, resolution: int) -> ShapeDataModule:
    """The embedded shapes as training reads them."""
    data = ShapeDataModule(
        directory / "shapes",
        source=partial(GeneratedShapes, train_per_class=options.train, test_per_class=options.test),
        cache_dir=directory / "cache",
        resolution=resolution,
        augment=Augment(scale=(0.75, 1.0), shift=0.1, jitter=0.01),
        batch_size=options.batch_size,
        num_workers=options.workers,
    )
    data.setup()
    return data


def time_cache(options: argparse.Namespace, directory: Path) -> tuple[int, float]:
    """Number of meshes sampled into the cache, and the seconds that took."""
    source = GeneratedShapes(
        directory / "shapes", train_per_class=options.train, test_per_class=options.test
    )
    count = sum(len(source.listing(split).names) for split in ("train", "test"))
    start_s = time.perf_counter()
    open_data(options, directory, 32)
    return count, time.perf_counter() - start_s


def loader_shapes_per_s(data: ShapeDataModule, least_s: float) -> float:
    """Shapes a second that the training loader yields, over whole epochs."""
    loader = data.train_dataloader()
    for _ in islice(loader, 2):
        pass  # workers start, files are mapped
    shapes, epoch, start_s = 0, 0, time.perf_counter()
    while time.perf_counter() - start_s < least_s:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        shapes += sum(len(batch["label"]) for batch in loader)
        epoch += 1
    return shapes / (time.perf_counter() - start_s)


def training_shapes_per_s(data: ShapeDataModule, steps: int, width: float) -> float:
    """Shapes a second of forward, backward and update, the batch being at hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = sparse_vgg16_bn(data.num_classes, width=width).to(device).train()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
    batches = islice(cycle(list(islice(data.train_dataloader(), steps))), WARM_UP_STEPS + steps)
    timed = [
        (len(batch["label"]), time_step(layers, optimizer, batch, device)) for batch in batches
    ]
    measured = timed[WARM_UP_STEPS:]
    return sum(size for size, _ in measured) / sum(seconds for _, seconds in measured)


def time_step(
    layers: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], device: torch.device
) -> float:
    """Seconds of one training step."""
    inputs, labels_B = batch["input"].to(device), batch["label"].to(device)
    start_s = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(layers(inputs), labels_B)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=20, help="training shapes of each class")
    parser.add_argument("--test", type=int, default=52, help="test shapes of each class (52)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="measured training steps")
    parser.add_argument("--seconds", type=float, default=5.0, help="least time of a loader run")
    parser.add_argument("--width", type=float, default=1.0, help="of the network (1)")
    parser.add_argument("--workers", type=int, default=default_workers(), help="loader processes")
    parser.add_argument("--beside", type=Path, help="checkout of another version")
    parser.add_argument("--loader", nargs=2, help=argparse.SUPPRESS)  # directory, resolution
    options = parser.parse_args()
    keep_freed_memory()  # as trainings on a CPU do
    if options.loader:
        data = open_data(options, Path(options.loader[0]), int(options.loader[1]))
        print(loader_shapes_per_s(data, options.seconds))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(
        f"{usable_cores()} cores, {torch.get_num_threads()} threads, {device}, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f}, loader processes {options.workers}"
    )
    with tempfile.TemporaryDirectory() as name:
        (report if options.beside is None else compare)(options, Path(name))


def compare(options: argparse.Namespace, directory: Path) -> None:
    """Measure this version's loader and the other's in turn, each in a process of its own."""
    open_data(options, directory, 32)  # writes the cache, which both read
    print("                  loader shapes/s  in the other version  ratio")
    for resolution in PAPER_OCCUPANCY:
        rates: dict[Path, list[float]] = {Path(__file__).parents[1]: [], options.beside: []}
        for checkout, rate in [*rates.items()] * TURNS:
            ran = subprocess.run(
                [sys.executable, *sys.argv, "--loader", str(directory), str(resolution)],
                env={**os.environ, "PYTHONPATH": str(checkout)},
                capture_output=True,
                text=True,
                check=True,
            )
            rate.append(float(ran.stdout))
        ours, theirs = map(statistics.median, rates.values())
        print(
            f"{resolution}^3, batch {options.batch_size:3d}  {ours:15.0f}  {theirs:20.0f}"
            f"  {ours / theirs:4.2f}x"
        )


def report(options: argparse.Namespace, directory: Path) -> None:
    """Measure and print everything."""
    count, seconds = time_cache(options, directory)
    print(f"cache build: {count} meshes in {seconds:.1f} s, {count / seconds:.0f} meshes/s")
    tested = len(open_data(options, directory, 32).samples("test"))
    print(f"occupancy: mean over {tested} test shapes with 4,096 points")
    print("                  occupied  paper  loader shapes/s  training shapes/s  ratio")
    least = float("inf")
    for resolution, printed in PAPER_OCCUPANCY.items():
        data = open_data(options, directory, resolution)
        occupied = mean_occupancy(data, resolution)
        loaded = loader_shapes_per_s(data, options.seconds)
        trained = training_shapes_per_s(data, options.steps, options.width)
        least = min(least, loaded / trained)
        print(
            f"{resolution}^3, batch {options.batch_size:3d}  {occupied:8.2%} {printed:6.1%}"
            f"  {loaded:15.0f}  {trained:17.1f}  {loaded / trained:4.0f}x"
        )
    verdict = "met" if least >= GOAL else "MISSED"
    print(f"goal, the loader at least {GOAL}x ahead of training: {verdict}, {least:.1f}x")


if __name__ == "__main__":
    main()
