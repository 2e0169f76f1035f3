"""What it brings to keep freed memory on processors, and how much more is resident for it.

Real Trainers, one thread for each process and gloo on loopback: dense and sparse VGG16-BN in one
process and as an asynchronous pipeline of two stages, a CNN on images in one process and by 1F1B.
Each with glibc's own way and with freed memory kept, in turns. Printed are medians of whole epochs,
and the most that was resident on each rank.

    python benchmarks/freed_memory.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from pipeline import EPOCHS, balanced_plan
from pipeline_options import announced, at_least, images, networks, parsed, parser_of
from pipeline_ranks import on_ranks
from pipeline_training import Way, train
from pipeline_workloads import Images, Vgg, Workload

from sparsepipe.tasks.fitting.memory import status_bytes

OWN, KEPT = "glibc's own", "kept"


def trained(rank: int, workload: Workload, way: Way, minibatches: int) -> tuple[float, int]:
    """Seconds a minibatch, and the most bytes that were resident."""
    epoch = train(rank, workload, way, minibatches, EPOCHS).last
    return epoch.whole_s / epoch.steps, status_bytes("VmHWM")


def compare(workload: Workload, way: Way, options: argparse.Namespace) -> None:
    """Trains with and without, in turns."""
    seconds: dict[str, list[float]] = {OWN: [], KEPT: []}
    resident: dict[str, list[list[int]]] = {OWN: [], KEPT: []}
    for _ in range(options.repeats):
        for name, each in seconds.items():
            found = on_ranks(
                trained, way.ranks, workload, way, options.minibatches, keeps_freed=name == KEPT
            )
            each.append(found[0][0])
            resident[name].append([most for _, most in found])
    print(f"\n{workload}; {way.name}")
    for name, each in seconds.items():
        most = [max(ranks) / 2**30 for ranks in zip(*resident[name], strict=True)]
        print(
            f"  {name:14}{statistics.median(each):8.3f} [{min(each):.3f}..{max(each):.3f}] "
            f"s a minibatch; at most {', '.join(f'{gib:.2f}' for gib in most)} GiB resident"
        )
    ratios = [own / kept for own, kept in zip(seconds[OWN], seconds[KEPT], strict=True)]
    print(f"  kept is {statistics.median(ratios):.2f} times as fast", flush=True)


def ways_of(workload: Vgg | Images, options: argparse.Namespace) -> list[Way]:
    """In one process, and as a pipeline of two."""
    parts = options.microbatches if isinstance(workload, Images) else 1
    plan = balanced_plan(workload, 2, 3, microbatches=parts)
    one = Way(name="one process", ranks=1)
    if parts == 1:
        return [one, Way(name="asynchronous, 1-1", ranks=2, plan=plan)]
    name = f"1F1B, 1-1, T = {parts}"
    return [one, Way(name=name, ranks=2, plan=plan, schedule="1f1b", microbatches=parts)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, only=("dense", "sparse", "images"), repeats=3, minibatches=8)
    parser.add_argument("--images", type=at_least(1), default=512, help="of a minibatch")
    parser.add_argument("--microbatches", type=at_least(2), default=32, help="of those: T")
    options = parsed(parser, arguments)
    if options.quick:
        options.repeats, options.minibatches, options.images, options.microbatches = 1, 4, 8, 4
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    options = parse(arguments)
    with announced(options):
        workloads: list[Vgg | Images] = list(networks(options))
        workloads += [images(options)] if "images" in options.only else []
        for workload in workloads:
            for way in ways_of(workload, options):
                compare(workload, way, options)


if __name__ == "__main__":
    main()
