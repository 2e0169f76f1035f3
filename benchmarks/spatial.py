"""How fast and how exact one sample over two ranks is, beside what else there is.

Everything in one run, one thread for each process, gloo on loopback:

- *training*: steps (forward, loss, backward, sum of gradients, update) of a CNN on images, a
  3D U-Net and a ConvNeXt, in one process, on the shards of two ranks, in two with DDP, which has a
  sample for each rank, and in a Trainer by an asynchronous pipeline of two stages, cut by the
  layers' times. Repetitions of all rows take turns; medians of samples a second are printed, and
  their ratio to one process, whose goal is 1.8 for shards.
- *dtensor*: the cases of the tests of spatial parallelism, by shards and by torch's DTensor on a
  mesh of two ranks: how many equal one process, differ in silence, or are refused.
- *link*: what of the communication is exposed over a link of 125 MB/s between two emulated hosts.
  Halos are waited for at once, and as the layers do it, while the interior is computed; the share
  of the time is printed, whose goal is at most 0.3. Where network namespaces are not permitted,
  arrivals are held back on loopback as long as the link would take.

    python benchmarks/spatial.py
    python benchmarks/spatial.py --quick
    python benchmarks/spatial.py --only dtensor
    python benchmarks/spatial.py --only training link --models unet3d --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from pipeline_ranks import RankFailed, on_ranks
from pipeline_training import Way, train
from spatial_dtensor import compare
from spatial_link import exposed
from spatial_steps import MODES, layer_seconds, sample_seconds
from spatial_workloads import NAMES, Sample, workload

from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import balanced

GOAL = 1.8
EXPOSED_GOAL = 0.3
LINK_BYTES_PER_S = 125e6
PARTS = ("training", "dtensor", "link")


def pipeline_seconds(sample: Sample, minibatches: int) -> float:
    """Of a minibatch, in the middle of an epoch of a Trainer."""
    seconds = on_ranks(layer_seconds, 1, sample)[0]
    cuts = balanced(seconds, [1, 1])
    plan = Plan.of(config="1-1", cuts=cuts, num_layers=len(seconds))
    way = Way(name="pipeline", ranks=2, plan=plan, metrics=False)
    steady_s: float = on_ranks(train, 2, sample, way, minibatches, 1)[0].last.steady_s
    return steady_s


def training(sample: Sample, options: argparse.Namespace) -> None:
    """Prints samples a second of all rows."""
    rows: dict[str, list[float]] = {}
    has_pipeline = options.pipeline
    for _ in range(options.repeats):
        for mode, ranks in MODES.items():
            found = on_ranks(sample_seconds, ranks, sample, mode, options.steps)
            rows.setdefault(mode, []).append(1 / max(found))
        if has_pipeline:
            try:
                rate = sample.batch_size / pipeline_seconds(sample, max(options.steps, 8))
                rows.setdefault("pipeline", []).append(rate)
            except RankFailed as error:
                print(f"  a pipeline has no row: {str(error).strip().splitlines()[-1]}")
                has_pipeline = False
    print(f"{sample}")
    one = statistics.median(rows["one process"])
    for name, rates in rows.items():
        median = statistics.median(rates)
        goal = f", goal {GOAL}" if name == "shards" else ""
        print(
            f"  {name:12} {median:8.3f} samples/s [{min(rates):.3f}..{max(rates):.3f}]  "
            f"x {median / one:.2f}{goal}"
        )


def link(sample: Sample, options: argparse.Namespace) -> None:
    """Prints which share of the time of messages is left when they overlap with computing."""
    found = exposed(sample, LINK_BYTES_PER_S, steps=options.steps, paced=options.paced)
    print(f"{sample}, over {found.kind} of {LINK_BYTES_PER_S / 1e6:g} MB/s")
    print(
        f"  a step sends {found.sent_bytes / 1e6:.2f} MB of halos a rank; waiting "
        f"{found.plain_s * 1e3:.1f} ms without overlap, {found.overlapped_s * 1e3:.1f} ms with it; "
        f"statistics of norms {found.reductions_s * 1e3:.1f} ms"
    )
    halos = found.overlapped_s / found.plain_s
    print(
        f"  exposed {halos:.2f} of the halos' time, {found.exposed_share:.2f} of all "
        f"communication, goal {EXPOSED_GOAL}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts that are chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed ones of a repetition")
    parser.add_argument("--width", type=float, default=0.5, help="multiplies all channels")
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1, 2, 3], help="of cases")
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--paced", action="store_true", help="hold messages back, on loopback")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.steps, options.dimensions = 1, 1, [1]
    print(f"torch {torch.__version__}, one thread a process")
    samples = [workload(name, quick=options.quick, width=options.width) for name in options.models]
    if "training" in options.only:
        for sample in samples:
            training(sample, options)
    if "dtensor" in options.only:
        for dimensions in options.dimensions:
            print(f"cases in {dimensions}D on 2 ranks, the last dimension cut")
            for name, counts in compare(dimensions, quick=options.quick).items():
                print(f"  {name:8} " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if "link" in options.only:
        for sample in samples:
            link(sample, options)


if __name__ == "__main__":
    main()
