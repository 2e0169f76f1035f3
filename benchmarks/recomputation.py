"""How much longer synchronous pipelines take that recompute all their activations.

Real Trainers, one thread for each process and gloo on loopback: a CNN on images and a sparse VGG16,
by one device and by two stages (GPipe), with `recompute=none` and with `recompute=all` in turns. Of
each pair the ratio of whole epochs is printed, the median over repetitions side by side.

    python benchmarks/recomputation.py
    python benchmarks/recomputation.py --only sparse --width 0.5 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from pipeline import EPOCHS, Rows, balanced_plan, ratio
from pipeline_options import announced, at_least, images, networks, parsed, parser_of
from pipeline_ranks import on_ranks
from pipeline_training import Way, train
from pipeline_workloads import Images, Vgg, Workload

from sparsepipe.schedule import Plan

MOST = 1.4
"""Time with recomputation, of that without: the goal."""


def compare(workload: Vgg | Images, ranks: int, options: argparse.Namespace) -> None:
    """Trains in as many stages without and with recomputation, in turns."""
    parts = min(options.microbatches, workload.batch_size)
    plan = _one_stage(workload)
    if ranks > 1:
        plan = balanced_plan(workload, ranks, 3, microbatches=parts)
    kept = Way(name="none", ranks=ranks, plan=plan, schedule="gpipe", microbatches=parts)
    ways = (kept, replace(kept, name="all", recompute="all"))
    whole: Rows = {way.name: [] for way in ways}
    for _ in range(options.repeats):
        for way in ways:
            epoch = on_ranks(train, ranks, workload, way, options.minibatches, EPOCHS)[0].last
            whole[way.name].append(epoch.whole_s / epoch.steps)
    print(f"\n{workload}; stages {plan.config}, cuts {plan.cuts}, T = {parts}", flush=True)
    for name, seconds in whole.items():
        least, most = min(seconds), max(seconds)
        median = statistics.median(seconds)
        print(f"  recompute={name:6}{median:9.4f} [{least:.4f}..{most:.4f}] s a minibatch")
    longer = ratio(whole, "all", "none")
    verdict = "met" if longer <= MOST else "MISSED"
    print(f"  {longer:.2f} times as long (goal at most {MOST:.2f}), {verdict}")


def _one_stage(workload: Workload) -> Plan:
    return Plan.of(config="1", cuts=(), num_layers=len(workload.layers()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, only=("images", "dense", "sparse"), repeats=3, minibatches=8)
    parser.set_defaults(only=["images", "sparse"], width=0.5, shapes=16)
    parser.add_argument("--images", type=at_least(1), default=256, help="of a minibatch of images")
    parser.add_argument("--microbatches", type=at_least(1), default=4, help="of a minibatch: T")
    options = parsed(parser, arguments)
    if options.quick:
        options.repeats, options.minibatches, options.images = 1, 4, 8
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    options = parse(arguments)
    with announced(options):
        cnn: list[Vgg | Images] = [images(options)] if "images" in options.only else []
        for workload in [*cnn, *networks(options)]:
            for ranks in (1, 2):
                compare(workload, ranks, options)


if __name__ == "__main__":
    main()
