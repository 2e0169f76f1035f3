"""Is the asynchronous pipeline as fast as its simulation says?

Two stages on two cores, dense VGG16-BN, the paper's network, one thread a process; everything in
one run:

- *Profile*: both processes run the profiler at the same time, as long as the slower one takes,
  since two processes share caches, memory and clock also when they train. Amid the passes they
  copy the weights, as a stage before the last does before each update, which is in no profile.
- *Link*: messages of the pipeline's transport over loopback.
- *Simulated*: the plan's schedule on these, an epoch of as many minibatches.
- *Real*: the same plan in a Trainer, as benchmarks/pipeline.py trains it.

All four take turns, --repeats times; each repetition compares what lies beside each other. What no
part of the simulation knows: Lightning's own work, and what sending costs the cores.

    python benchmarks/simulated_pipeline.py
    python benchmarks/simulated_pipeline.py --only dense sparse
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from pipeline import EPOCHS, balanced_plan
from pipeline_bound import TIMEOUT_S
from pipeline_ranks import on_ranks
from pipeline_training import Way, train
from pipeline_workloads import Vgg, Workload, module

from sparsepipe.cluster import Link
from sparsepipe.profiling import Profile
from sparsepipe.profiling.measure import measure
from sparsepipe.runtime import group
from sparsepipe.runtime.bandwidth import Bench, Effort, Sending, time_pairs
from sparsepipe.runtime.weights.memory import Memory
from sparsepipe.schedule import Plan
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.run import Setting
from sparsepipe.simulate.schedules import Simulation
from sparsepipe.simulate.steady import Pace
from sparsepipe.simulate.workload import Workload as Costs

GOAL = 0.10
"""Simulated and real throughput lie no further apart."""
LINK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank has measured of the whole network.

    Attributes:
        profile: of its layers.
        copy_s: of all its weights.
    """

    profile: Profile
    copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One repetition.

    Attributes:
        simulated: of an epoch.
        copies: of weights before an update, in each stage, in seconds.
        link: between the ranks.
        steady_s: of a minibatch in the middle of a real epoch.
        epoch_s: of the real epoch.
        minibatches: of it.
    """

    simulated: Pace
    copies: tuple[float, ...]
    link: Link
    steady_s: float
    epoch_s: float
    minibatches: int

    @property
    def steady(self) -> float:
        """Simulated over real throughput in the middle of an epoch."""
        return self.steady_s / self.simulated.minibatch_s

    @property
    def whole(self) -> float:
        """The same of whole epochs."""
        return self.epoch_s / self.simulated.total_s


def measured(rank: int, workload: Workload, passes: int) -> Measured:
    """Profiles the network while all other ranks do the same."""
    group.join("gloo", timeout_s=TIMEOUT_S)
    classifier = module(workload)
    layers = classifier.layers
    memory = Memory(dict(layers.named_parameters()))
    copies_s: list[float] = []

    def copy(number: int) -> None:
        del number
        start_s = time.perf_counter()
        left = memory.move()
        copies_s.append(time.perf_counter() - start_s)
        memory.give_back(left)

    inputs = [workload.input(number) for number in range(3)]
    run = partial(
        measure,
        layers,
        inputs,
        device=torch.device("cpu"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        between=copy,
    )
    dist.barrier()
    profile = run(num_warmup=2, num_measured=passes, meta={"batch_size": workload.batch_size})
    copy_s = statistics.median(copies_s[2:])
    store = group.store()
    store.add("measured", 1)
    while store.add("measured", 0) < dist.get_world_size():  # the others are not done: stay busy
        run(num_warmup=0, num_measured=1)
    dist.barrier()
    group.leave()
    return Measured(profile=profile, copy_s=copy_s)


def sent(rank: int) -> list[Sending]:
    """Times messages between two ranks."""
    group.join("gloo", timeout_s=TIMEOUT_S)
    bench = Bench(Effort(repeats=20, warmups=3, most_s=5.0, timeout_s=TIMEOUT_S))
    found = time_pairs(bench, [(0, 1)], [LINK_BYTES])
    bench.close()
    group.leave()
    return found


def loopback() -> Link:
    """Between two ranks of this machine, by the transport's messages."""
    one_way = on_ranks(sent, 2)[0][0]
    return Link(bytes_per_s=one_way.bytes_per_s, latency_s=one_way.latency_s)


def costs_of(plan: Plan, told: Sequence[Measured]) -> tuple[Costs, tuple[float, ...]]:
    """What the plan's stages cost, with the copies before updates, and these alone."""
    profiles = {f"rank {rank}": each.profile for rank, each in enumerate(told)}
    costs = Costs.of(plan, profiles)
    copies = []
    stages = []
    for stage, each in enumerate(costs.stages):
        rank = plan.ranks_of(stage).start
        share = each.parameter_bytes / told[rank].profile.parameter_bytes
        # The last stage has no other minibatch in flight that would need the old weights.
        copies.append(told[rank].copy_s * share if plan.warmup(stage) else 0.0)
        stages.append(replace(each, update_s=each.update_s + copies[-1]))
    return replace(costs, stages=tuple(stages)), tuple(copies)


def compared(workload: Workload, plan: Plan, options: argparse.Namespace) -> Compared:
    """One repetition of all."""
    told = on_ranks(measured, plan.num_ranks, workload, options.passes)
    costs, copies = costs_of(plan, told)
    link = loopback()
    setting = Setting(network=Network.flat(plan.num_ranks, link))
    simulated = Simulation.of(costs, setting).pace(options.minibatches)
    way = Way(name="pipeline", ranks=plan.num_ranks, plan=plan)
    real = on_ranks(train, way.ranks, workload, way, options.minibatches, EPOCHS)[0]
    return Compared(
        simulated=simulated,
        copies=copies,
        link=link,
        steady_s=real.steady_s,
        epoch_s=real.epoch_s,
        minibatches=real.steps,
    )


def compare(workload: Vgg, options: argparse.Namespace) -> None:
    """Prints all repetitions, and how far the simulation is off."""
    plan = balanced_plan(workload, 2, options.cut_passes)
    print(f"\n{workload}; cut before layer {plan.cuts[0]} of {plan.num_layers}", flush=True)
    print(f"  {'':8}{'minibatches/s':^28}{'of a whole epoch':^28}{'copies':>12}{'link':>22}")
    columns = f"{'simulated':>11}{'real':>9}{'ratio':>8}"
    print(f"  {'':8}{columns}{columns}")
    rows = []
    for number in range(options.repeats):
        row = compared(workload, plan, options)
        rows.append(row)
        print(
            f"  {number:<8}{1 / row.simulated.minibatch_s:11.3f}{1 / row.steady_s:9.3f}"
            f"{row.steady:8.3f}{row.minibatches / row.simulated.total_s:11.3f}"
            f"{row.minibatches / row.epoch_s:9.3f}{row.whole:8.3f}"
            f"{1e3 * max(row.copies):9.1f} ms{row.link.bytes_per_s / 1e6:9.0f} MB/s, "
            f"{1e3 * row.link.latency_s:.2f} ms",
            flush=True,
        )
    for name, ratios in (
        ("in the middle of an epoch", [row.steady for row in rows]),
        ("whole epochs", [row.whole for row in rows]),
    ):
        off = statistics.median(ratios) - 1
        verdict = "met" if abs(off) <= GOAL else "MISSED"
        print(
            f"  simulated over real throughput, {name}: {off:+.1%} [{min(ratios) - 1:+.1%}.."
            f"{max(ratios) - 1:+.1%}] (goal within {GOAL:.0%}), {verdict}"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["dense", "sparse"], nargs="+", default=["dense"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minibatches", type=int, default=32, help="of an epoch, even")
    parser.add_argument("--passes", type=int, default=20, help="of the profiler that count")
    parser.add_argument("--cut-passes", type=int, default=5, help="that time the layers for a cut")
    parser.add_argument("--width", type=float, default=1.0, help="of VGG16; 1 is the paper's")
    parser.add_argument("--shapes", type=int, help="of a minibatch; default: dense 2, sparse 4")
    parser.add_argument("--quick", action="store_true", help="small and fast, times mean nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.minibatches, options.passes, options.cut_passes = 1, 6, 2, 1
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    options = parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # of every process that is started
    started_s = time.perf_counter()
    print(
        f"{len(os.sched_getaffinity(0))} cores, one thread a process, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}; {options.repeats} repetitions of "
        f"{options.minibatches} minibatches"
    )
    small = partial(Vgg, depth=11, width=1 / 16, resolution=8, points=64, batch_size=2)
    paper = partial(Vgg, depth=16, width=options.width)
    nets = {
        "dense": partial(paper, resolution=16, points=1024, batch_size=options.shapes or 2),
        "sparse": partial(paper, resolution=32, points=2048, batch_size=options.shapes or 4),
    }
    for kind in options.only:
        make = small if options.quick else nets[kind]
        compare(make(sparse=kind == "sparse"), options)
    print(f"\ntook {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
