"""How fast pipelines train, beside one process, DDP, torch's own and what is possible.

Everything in one run, one thread for each process, real Trainers and gloo on loopback:

- Dense and sparse VGG16-BN, the paper's network, in one process, in two with DDP and as a
  pipeline of two stages, whose cut is found by timing the layers first. The *bound* is one
  minibatch in the slowest stage's own time: both stages compute at once and nothing is sent
  (``pipeline_bound.py``). ``--width 0.5`` has a quarter of the parameters to reduce.
- Layers that sleep in as many stages as there are ranks, so that cores are no limit.
- A CNN on images by synchronous pipelines of two stages (GPipe and 1F1B with flush), ours and
  those of torch.distributed.pipelining: the same layers, cut, minibatches, microbatches, loss and
  optimizer, without metrics and logs on either side. Torch's are measured as they are, and once
  more with freed memory kept, as all other rows here and runs of ``sparsepipe`` have it: the one is
  what their users have, the other how the pipelines themselves compare.
- Bytes that were sent beside the least that can be: features once each way, coordinates once
  down. Sets of weights of each stage beside what the schedule tells.

Repetitions of all rows take turns; medians are printed, with the least and the largest. The
*steady* time is that between steps in the middle of an epoch; the epoch's own includes filling
and draining the pipeline.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --only sleep --ranks 3 8
    python benchmarks/pipeline.py --only torch --repeats 3 --minibatches 8
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline_bound import layer_seconds, least_bytes, parameter_bytes, stage_seconds
from pipeline_options import (
    KINDS,
    above_zero,
    announced,
    at_least,
    images,
    networks,
    parsed,
    parser_of,
)
from pipeline_ranks import on_ranks
from pipeline_torch import SCHEDULES, train_by_torch
from pipeline_training import Trained, Way, train
from pipeline_workloads import Images, Sleeping, Vgg, Workload

from sparsepipe.schedule import Plan
from sparsepipe.schedule.asynchronous import asynchronous
from sparsepipe.schedule.plan import balanced
from sparsepipe.schedule.versions import peaks

BOUND_GOAL = 0.93
DDP_GOAL = 1.15
SLEEP_GOAL = 0.97
TORCH_GOAL = 1.0
KEPT = "torch's with freed memory kept, too"
EPOCHS = 2
"""The first one warms up."""

Rows = dict[str, list[float]]
"""Seconds a minibatch by row, one for each repetition."""


def balanced_plan(
    workload: Vgg | Images, ranks: int, passes: int, *, microbatches: int = 1
) -> Plan:
    """One rank a stage, cut where the layers' times on one of the microbatches are shared best."""
    one = replace(workload, batch_size=max(1, workload.batch_size // microbatches))
    seconds = on_ranks(layer_seconds, ranks, one, passes * microbatches)[0]
    cuts = balanced(seconds, [1] * ranks)
    return Plan.of(config="-".join("1" * ranks), cuts=cuts, num_layers=len(seconds))


def even_plan(workload: Sleeping) -> Plan:
    """A sleeping layer for each rank."""
    return Plan.of(
        config="-".join("1" * workload.stages),
        cuts=range(1, workload.stages),
        num_layers=workload.stages + 1,
    )


def measured(
    workload: Workload, ways: Sequence[Way], options: argparse.Namespace
) -> tuple[Rows, Rows, list[Trained]]:
    """Steady and whole times of all rows and the bound; what the pipeline's ranks told last."""
    plan = next(way.plan for way in ways if way.plan is not None)
    bound = "bound, the slowest stage"
    steady: Rows = {name: [] for name in [bound, *(way.name for way in ways)]}
    whole: Rows = {name: [] for name in steady}
    told: list[Trained] = []
    for _ in range(options.repeats):
        slowest_s = max(on_ranks(stage_seconds, plan.num_ranks, workload, plan, options.bound_s))
        steady[bound].append(slowest_s)
        whole[bound].append(slowest_s)
        for way in ways:
            found = on_ranks(train, way.ranks, workload, way, options.minibatches, EPOCHS)
            told = found if way.plan is not None else told
            epoch = found[0].last
            steady[way.name].append(epoch.steady_s / way.readers)
            whole[way.name].append(epoch.whole_s / epoch.steps / way.readers)
    return steady, whole, told


def print_rows(steady: Rows, whole: Rows, batch_size: int) -> None:
    """A line for each row; throughput from whole epochs."""
    names = list(steady)
    one, bound = names[1], names[0]
    print(
        f"  {'':26}{'minibatches/s':>22}{'shapes/s':>10}"
        f"{f'x {one}':>15}{'of bound':>10}{'steady':>10}"
    )
    for name in names:
        rates = sorted(1 / seconds for seconds in whole[name])
        speed = ratio(whole, one, name)
        print(
            f"  {name:26}{statistics.median(rates):8.3f} [{rates[0]:.3f}..{rates[-1]:.3f}]"
            f"{statistics.median(rates) * batch_size:10.1f}{speed:15.2f}"
            f"{ratio(whole, bound, name):10.1%}{ratio(steady, bound, name):10.1%}"
        )


def ratio(rows: Rows, slow: str, fast: str) -> float:
    """How much faster one row is than another: median over repetitions, side by side."""
    return statistics.median(a / b for a, b in zip(rows[slow], rows[fast], strict=True))


def print_goal(text: str, value: float, goal: float, *, percent: bool = True) -> None:
    """Whether it is reached."""
    verdict = "met" if value >= goal else "MISSED"
    shown = f"{value:.1%} (goal {goal:.0%})" if percent else f"{value:.2f} (goal {goal:.2f})"
    print(f"  {text}: {shown}, {verdict}")


def print_traffic(
    workload: Workload, plan: Plan, told: Sequence[Trained], minibatches: int
) -> None:
    """Bytes that ranks sent beside the least."""
    least = sum(cut.sum for cut in on_ranks(least_bytes, 1, workload, plan)[0])
    sums: Mapping[str, list[int]] = {
        kind: [sum(rank.sent[kind][i] for rank in told) for i in range(3)] for kind in told[0].sent
    }
    payload = sum(entry[1] for entry in sums.values()) / minibatches
    headers = sum(entry[2] for entry in sums.values()) / minibatches
    print(
        f"  bytes a minibatch: {payload:,.0f} of tensors, {headers:,.0f} of headers; least "
        f"{least:,.0f}; {(payload + headers) / least:.4f}x"
    )
    for kind, (messages, tensors, overhead) in sums.items():
        if messages:
            print(
                f"    {kind:12}{messages / minibatches:6.2f} messages, "
                f"{tensors / minibatches:14,.0f} of tensors, {overhead / minibatches:8,.0f}"
            )


def print_weights(
    workload: Workload, plan: Plan, told: Sequence[Trained], minibatches: int
) -> None:
    """Sets of weights on each rank beside the schedule's."""
    schedule = asynchronous(plan, minibatches)
    sizes = on_ranks(parameter_bytes, 1, workload, plan)[0]
    for rank, found in enumerate(told):
        expected = peaks(schedule, rank).stashed
        size = sizes[plan.stage_of(rank)]
        print(
            f"  rank {rank}, layers {'{}..{}'.format(*plan.stages[plan.stage_of(rank)].layers)}: "
            f"{found.peak_versions} sets of weights ({expected} by the schedule), "
            f"{found.peak_bytes:,} bytes ({expected * size:,})"
        )


def compare(workload: Vgg, options: argparse.Namespace) -> None:
    """One process, DDP and a pipeline of two."""
    plan = balanced_plan(workload, 2, options.passes)
    print(f"\n{workload}; cut before layer {plan.cuts[0]} of {plan.num_layers}", flush=True)
    ways = [
        Way(name="one process", ranks=1),
        Way(name="DDP, 2 processes", ranks=2),
        Way(name="pipeline 1-1", ranks=2, plan=plan),
    ]
    steady, whole, told = measured(workload, ways, options)
    print_rows(steady, whole, workload.batch_size)
    bound, _, ddp, pipeline = steady
    print_goal("pipeline, share of the bound, steady", ratio(steady, bound, pipeline), BOUND_GOAL)
    faster = ratio(whole, ddp, pipeline)
    print_goal("pipeline, times DDP, whole epochs", faster, DDP_GOAL, percent=False)
    print_traffic(workload, plan, told, EPOCHS * options.minibatches)
    print_weights(workload, plan, told, options.minibatches)


def sleep(workload: Sleeping, options: argparse.Namespace) -> None:
    """A pipeline of many ranks."""
    plan = even_plan(workload)
    print(f"\n{workload}", flush=True)
    way = Way(name=f"pipeline {plan.config}", ranks=plan.num_ranks, plan=plan)
    steady, whole, told = measured(workload, [way], options)
    print_rows(steady, whole, workload.batch_size)
    bound, pipeline = steady
    print_goal("share of the bound, steady", ratio(steady, bound, pipeline), SLEEP_GOAL)
    print_traffic(workload, plan, told, EPOCHS * options.minibatches)
    print_weights(workload, plan, told, options.minibatches)


def beside_torch(workload: Images, options: argparse.Namespace) -> None:
    """Synchronous pipelines of two, ours and torch's, in turns."""
    parts = options.microbatches
    plan = balanced_plan(workload, 2, options.passes, microbatches=parts)
    print(f"\n{workload}; cut before layer {plan.cuts[0]} of {plan.num_layers}, T = {parts}")
    one = Way(name="one process", ranks=1, metrics=False)
    two = replace(one, ranks=2, plan=plan, microbatches=parts)
    ours = {name: replace(two, name=f"{name}, ours", schedule=name) for name in SCHEDULES}
    size = (options.minibatches, EPOCHS)
    whole: Rows = {}
    for _ in range(options.repeats):
        found = {one.name: on_ranks(train, 1, workload, one, *size)}
        for name, way in ours.items():
            found[way.name] = on_ranks(train, 2, workload, way, *size)
            for row, keeps_freed in ((f"{name}, torch", False), (f"{name}, torch, kept", True)):
                found[row] = on_ranks(
                    train_by_torch, 2, workload, way, *size, keeps_freed=keeps_freed
                )
        for row, told in found.items():
            whole.setdefault(row, []).append(told[0].last.whole_s / options.minibatches)
    for row, seconds in whole.items():
        rates = sorted(1 / each for each in seconds)
        print(
            f"  {row:26}{statistics.median(rates):8.3f} [{rates[0]:.3f}..{rates[-1]:.3f}] "
            f"minibatches/s, {ratio(whole, one.name, row):.2f} x one process"
        )
    for name, way in ours.items():
        for row, beside in ((f"{name}, torch", "torch's"), (f"{name}, torch, kept", KEPT)):
            faster = ratio(whole, row, way.name)
            print_goal(f"{name}, times {beside}", faster, TORCH_GOAL, percent=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(
        __doc__, only=(*KINDS, "sleep", "torch"), repeats=5, minibatches=32, readers=2
    )
    parser.add_argument("--passes", type=at_least(1), default=5, help="that time the layers")
    parser.add_argument("--bound-s", type=above_zero, default=6.0, help="that a stage is measured")
    parser.add_argument(
        "--ranks", type=at_least(2), nargs="+", default=[3, 4, 8], help="that sleep"
    )
    parser.add_argument("--sleep-ms", type=above_zero, nargs=2, default=[30.0, 60.0])
    parser.add_argument("--kib", type=at_least(1), default=256, help="of a sleeper's activation")
    parser.add_argument("--images", type=at_least(1), default=512, help="of a minibatch of torch's")
    parser.add_argument("--microbatches", type=at_least(1), default=32, help="of it: T")
    options = parsed(parser, arguments)
    if options.quick:
        options.repeats, options.minibatches, options.passes = 1, 6, 1
        options.bound_s, options.sleep_ms, options.kib = 0.01, [1.0, 2.0], 4
        options.images, options.microbatches = 8, 4
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    options = parse(arguments)
    with announced(options):
        for network in networks(options):
            compare(network, options)
        forward_ms, backward_ms = options.sleep_ms
        for ranks in options.ranks if "sleep" in options.only else []:
            workload = Sleeping(
                stages=ranks, forward_ms=forward_ms, backward_ms=backward_ms, kib=options.kib
            )
            sleep(workload, options)
        if "torch" in options.only:
            beside_torch(images(options), options)


if __name__ == "__main__":
    main()
