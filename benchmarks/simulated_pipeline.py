"""Is the asynchronous pipeline as fast as its simulation says?

Two stages on two cores, VGG16 with batch normalization, the paper's network, one thread a process:

- *Profiled*: both cores run the profiler on the whole network, since two processes share caches,
  memory and clock also when they train.
- *Real*: a plan in a Trainer, as benchmarks/pipeline.py trains it.
- *Simulated*: the same plan on the two profiles and on messages timed over loopback, an epoch of as
  many minibatches, as task=simulate does it.

Profilers and trainers are different processes that take turns of some seconds, so that a machine
whose speed changes with the minutes shows the same to both. A turn is an epoch, or passes over all
layers with a step in one piece, a copy of the weights and an update amid them. Of all turns of a
repetition medians are taken; the first of each warms up.

What no part of the simulation knows: Lightning's own work, the loss, and what sending costs the
cores. For each stage the table has what was simulated for a minibatch beside what was measured
around the very calls in the real pipeline; what is left of a minibatch's time is waiting and what
lies between these calls.

    python benchmarks/simulated_pipeline.py
    python benchmarks/simulated_pipeline.py --only dense --repeats 1
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline import balanced_plan
from pipeline_bound import TIMEOUT_S
from pipeline_calls import CALLS
from pipeline_options import KINDS, announced, at_least, networks, parsed, parser_of
from pipeline_ranks import Crew, Turns, on_crews, on_ranks
from pipeline_training import Way
from pipeline_turns import RankTimes, Size, profiled, trained
from pipeline_workloads import Vgg, Workload

from sparsepipe.cluster import Link
from sparsepipe.profiling import Profile
from sparsepipe.runtime.bandwidth import Benchmark, MessageTime, TimingBudget, time_pairs
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Pace, Simulation
from sparsepipe.simulate.workload import Workload as Costs

GOAL = 0.10
"""Simulated and real throughput lie no further apart."""
LINK_BYTES = 2**20
LIMIT_S = 3600.0
"""Of a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One repetition.

    Attributes:
        costs: that were simulated, of each stage.
        pace: that came of it.
        profiles: of each rank.
        trained: by each rank.
        link: between the ranks.
    """

    costs: Costs
    pace: Pace
    profiles: Sequence[Profile]
    trained: Sequence[RankTimes]
    link: Link

    @property
    def steady_s(self) -> float:
        """Of a minibatch in the middle of a real epoch."""
        return statistics.median(epoch.steady_s for epoch in self.trained[0].epochs)

    @property
    def whole_s(self) -> float:
        """Of a real epoch."""
        return statistics.median(epoch.whole_s for epoch in self.trained[0].epochs)

    @property
    def steady(self) -> float:
        """Simulated over real throughput in the middle of an epoch."""
        return self.steady_s / self.pace.minibatch_s

    @property
    def whole(self) -> float:
        """The same of whole epochs."""
        return self.whole_s / self.pace.total_s

    def simulated_s(self, stage: int, kind: str) -> float:
        """Of a minibatch in a stage of one rank, once the pipeline is full."""
        costs = self.costs.stages[stage]
        found = {
            "forward": costs.forward_s[0],
            "backward": costs.backward_s[0],
            # The last stage has no other minibatch in flight that would need the old weights.
            "copy": costs.copy_s if self.costs.plan.warmup(stage) else 0.0,
            "update": costs.update_s,
        }
        return found[kind]


def sent(rank: int) -> list[MessageTime]:
    """Times messages between two ranks."""
    process_group.join("gloo", timeout_s=TIMEOUT_S)
    bench = Benchmark(TimingBudget(repeats=20, warmups=3, most_s=5.0, timeout_s=TIMEOUT_S))
    found = time_pairs(bench, [(0, 1)], [LINK_BYTES])
    bench.close()
    process_group.leave()
    return found


def loopback() -> Link:
    """Between two ranks of this machine, by the transport's messages."""
    one_way = on_ranks(sent, 2)[0][0]
    return Link(bytes_per_s=one_way.bytes_per_s, latency_s=one_way.latency_s)


def compared(workload: Workload, plan: Plan, size: Size) -> Compared:
    """One repetition."""
    link, ranks = loopback(), plan.num_ranks
    way = Way(name="pipeline", ranks=ranks, plan=plan)
    turns = Turns(2 * ranks, limit_s=TIMEOUT_S)
    profiles, told = on_crews(
        [
            Crew(profiled, ranks, (workload, turns, size)),
            Crew(trained, ranks, (workload, way, turns, size)),
        ],
        limit_s=LIMIT_S,
    )
    costs = Costs.of(plan, {f"rank {rank}": profile for rank, profile in enumerate(profiles)})
    setting = Setting(network=ClusterNetwork.flat(ranks, link))
    return Compared(
        costs=costs,
        pace=Simulation.of(costs, setting).pace(size.minibatches),
        profiles=profiles,
        trained=told,
        link=link,
    )


def compare(workload: Vgg, options: argparse.Namespace) -> None:
    """Prints all repetitions, how far the simulation is off, and where."""
    plan = balanced_plan(workload, 2, options.cut_passes)
    size = Size(turns=options.turns, passes=options.passes, minibatches=options.minibatches)
    print(f"\n{workload}; cut before layer {plan.cuts[0]} of {plan.num_layers}", flush=True)
    print(f"  {'':4}{'minibatches/s':^28}{'of a whole epoch':^28}{'link':>22}")
    columns = f"{'simulated':>11}{'real':>9}{'ratio':>8}"
    print(f"  {'':4}{columns}{columns}")
    rows = []
    for number in range(options.repeats):
        row = compared(workload, plan, size)
        rows.append(row)
        print(
            f"  {number:<4}{1 / row.pace.minibatch_s:11.3f}{1 / row.steady_s:9.3f}"
            f"{row.steady:8.3f}{size.minibatches / row.pace.total_s:11.3f}"
            f"{size.minibatches / row.whole_s:9.3f}{row.whole:8.3f}"
            f"{row.link.bytes_per_s / 1e6:9.0f} MB/s, {1e3 * row.link.latency_s:.2f} ms",
            flush=True,
        )
    print_stages(plan, rows)
    print_layers(rows)
    print_verdict("in the middle of an epoch", [row.steady for row in rows])
    print_verdict("whole epochs", [row.whole for row in rows])


def print_stages(plan: Plan, rows: Sequence[Compared]) -> None:
    """What each stage does in a minibatch, simulated and real; medians over repetitions."""
    print("  ms of a minibatch" + "".join(f"{kind:>10}" for kind in (*CALLS, "sum", "minibatch")))
    for stage in range(plan.num_stages):
        simulated = [
            1e3 * statistics.median(row.simulated_s(stage, kind) for row in rows) for kind in CALLS
        ]
        real = [
            1e3 * statistics.median(row.trained[stage].busy_s(kind) for row in rows)
            for kind in CALLS
        ]
        for name, parts, minibatch_s in (
            ("simulated", simulated, statistics.median(row.pace.minibatch_s for row in rows)),
            ("real", real, statistics.median(row.steady_s for row in rows)),
        ):
            figures = (*parts, sum(parts), 1e3 * minibatch_s)
            print(f"  stage {stage} {name:11}" + "".join(f"{each:10.4f}" for each in figures))


def print_layers(rows: Sequence[Compared]) -> None:
    """The sum of all layers beside a step in one piece, on each rank's core."""
    for rank in range(len(rows[0].profiles)):
        profiles = [row.profiles[rank] for row in rows]
        layers_s = statistics.median(profile.compute_s for profile in profiles)
        step_s = statistics.median(float(profile.meta["step_s"]) for profile in profiles)
        print(
            f"  profile of rank {rank}: the layers take {1e3 * layers_s:.1f} ms one by one, a step "
            f"of all {1e3 * step_s:.1f} ms ({layers_s / step_s:.1%})"
        )


def print_verdict(what: str, ratios: Sequence[float]) -> None:
    """How far apart simulated and real throughput lie."""
    off = statistics.median(ratios) - 1
    verdict = "met" if abs(off) <= GOAL else "MISSED"
    print(
        f"  simulated over real throughput, {what}: {off:+.1%} [{min(ratios) - 1:+.1%}.."
        f"{max(ratios) - 1:+.1%}] (goal within {GOAL:.0%}), {verdict}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, only=KINDS, repeats=3, minibatches=16)
    parser.add_argument(
        "--turns", type=at_least(1), default=8, help="of profilers and trainers each"
    )
    parser.add_argument("--passes", type=at_least(1), default=4, help="of a profiler's turn")
    parser.add_argument(
        "--cut-passes", type=at_least(1), default=5, help="that time the layers for a cut"
    )
    options = parsed(parser, arguments)
    if options.quick:
        options.repeats, options.turns, options.passes, options.cut_passes = 1, 2, 2, 1
        options.minibatches = 6
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints everything."""
    options = parse(arguments)
    with announced(options):
        for network in networks(options):
            compare(network, options)


if __name__ == "__main__":
    main()
