"""What the benchmarks of the pipeline have in common: their options, networks and first line."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from pipeline_workloads import Images, Vgg

from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import user_decides

KINDS = ("dense", "sparse")
"""Of networks."""
LEAST_MINIBATCHES = 4
"""Of an epoch: each of two ranks that read ends two steps, and there is a time between them."""


def parser_of(
    description: str | None,
    *,
    only: Sequence[str],
    repeats: int,
    minibatches: int,
    readers: int = 1,
) -> argparse.ArgumentParser:
    """The options of all of them.

    Args:
        description: of the benchmark.
        only: what it can be told to measure, all of which it measures if it is not told.
        repeats: how many repetitions, if it is not told.
        minibatches: of an epoch, if it is not told.
        readers: ranks that share an epoch's minibatches, at most.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=only, nargs="+", default=list(only))
    parser.add_argument("--repeats", type=at_least(1), default=repeats)
    parser.add_argument(
        "--minibatches", type=partial(_with_a_middle, readers), default=minibatches,
        help="of an epoch" + (f", a multiple of {readers}" if readers > 1 else ""),
    )  # fmt: skip
    parser.add_argument("--width", type=above_zero, default=1.0, help="of VGG16; 1 is the paper's")
    parser.add_argument(
        "--shapes", type=at_least(1), help="of a minibatch; default: dense 2, sparse 4"
    )
    parser.add_argument("--quick", action="store_true", help="small and fast, times mean nothing")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the parser finds, after a look at options that do not go together."""
    options = parser.parse_args(arguments)
    if options.shapes == 1 and "dense" in options.only:
        parser.error(
            "argument --shapes: of 1 shape, the last layers of the dense network have one voxel, "
            "which cannot be normalized: give 2 or more, or --only sparse"
        )
    return options


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def number(text: str) -> int:
        found = _whole(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{found} is too few: give {least} or more")
        return found

    return number


def above_zero(text: str) -> float:
    """The type of an option that is any other number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _with_a_middle(readers: int, text: str) -> int:
    minibatches = _whole(text)
    if minibatches < LEAST_MINIBATCHES:
        raise argparse.ArgumentTypeError(
            f"an epoch of {minibatches} has no time between steps that could be measured: give "
            f"{LEAST_MINIBATCHES} or more"
        )
    if minibatches % readers:
        raise argparse.ArgumentTypeError(
            f"{readers} ranks cannot take as many each of an epoch of {minibatches}: give a "
            f"multiple of {readers}"
        )
    return minibatches


@contextmanager
def announced(options: argparse.Namespace) -> Iterator[None]:
    """Says on what is measured, and in the end how long it took."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of every process that is started
    started_s = time.perf_counter()
    print(
        f"{usable_cores()} cores, one thread a process, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}; {options.repeats} repetitions of "
        f"{options.minibatches} minibatches"
    )
    if user_decides(os.environ):
        print("glibc's variables say what becomes of freed memory: no row has it kept")
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


def images(options: argparse.Namespace) -> Images:
    """A CNN like that of experiment=pipeline_depth, or a small one, on the images asked for."""
    if options.quick:
        return Images(convolutions=4, width=0.125, batch_size=options.images)
    # As many as in what is recorded in docs/pipeline.md and experiments/pipeline_depth.
    return Images(convolutions=22, width=1.0, batch_size=options.images)
