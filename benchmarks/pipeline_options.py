"""What the benchmarks of the pipeline have in common: their options, networks and first line."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from pipeline_workloads import Vgg

KINDS = ("dense", "sparse")
"""Of networks."""
LEAST_MINIBATCHES = 4
"""Of an epoch: each of two ranks that read ends two steps, and there is a time between them."""


def parser_of(
    description: str | None, *, only: Sequence[str], repeats: int, minibatches: int
) -> argparse.ArgumentParser:
    """The options of all of them.

    Args:
        description: of the benchmark.
        only: what it can be told to measure, all of which it measures if it is not told.
        repeats: how many repetitions, if it is not told.
        minibatches: of an epoch, if it is not told.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=only, nargs="+", default=list(only))
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--minibatches", type=_with_a_middle, default=minibatches, help="of an epoch, even"
    )
    parser.add_argument("--width", type=float, default=1.0, help="of VGG16; 1 is the paper's")
    parser.add_argument("--shapes", type=int, help="of a minibatch; default: dense 2, sparse 4")
    parser.add_argument("--quick", action="store_true", help="small and fast, times mean nothing")
    return parser


def _with_a_middle(text: str) -> int:
    minibatches = int(text)
    if minibatches < LEAST_MINIBATCHES:
        raise argparse.ArgumentTypeError(
            f"an epoch of {minibatches} has no time between steps that could be measured: give "
            f"{LEAST_MINIBATCHES} or more"
        )
    return minibatches


@contextmanager
def announced(options: argparse.Namespace) -> Iterator[None]:
    """Says on what is measured, and in the end how long it took."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of every process that is started
    started_s = time.perf_counter()
    print(
        f"{len(os.sched_getaffinity(0))} cores, one thread a process, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}; {options.repeats} repetitions of "
        f"{options.minibatches} minibatches"
    )
    yield
    print(f"\ntook {time.perf_counter() - started_s:.0f} s")


def networks(options: argparse.Namespace) -> list[Vgg]:
    """Those that are asked for: the paper's, or small ones."""
    small = partial(Vgg, depth=11, width=1 / 16, resolution=8, points=64, batch_size=2)
    paper = partial(Vgg, depth=16, width=options.width)
    nets = {
        "dense": partial(paper, resolution=16, points=1024, batch_size=options.shapes or 2),
        "sparse": partial(paper, resolution=32, points=2048, batch_size=options.shapes or 4),
    }
    return [
        (small if options.quick else nets[kind])(sparse=kind == "sparse")
        for kind in KINDS
        if kind in options.only
    ]
