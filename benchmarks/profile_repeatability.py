"""Do two profiles of one device say the same? Run it on a machine that does nothing else.

Takes profiles by the command line, one process after the other, and prints of each the sum of
its layers beside the measured step, the optimizer's update, and which plan HETE-MP makes of it
for two such devices; then how far the totals (layers and update) lie apart, and what the worst of
these plans costs by another profile, compared with that profile's own plan. Goals: totals within
10 %, plans within 3 %, the sum of layers within 10 % of the step.

    python benchmarks/profile_repeatability.py model=sparse_vgg16_bn data.resolution=32
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.cluster import Inventory
from sparsepipe.partition.costs.model import bottleneck_s, cost_model
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.search.algorithms import hete_mp
from sparsepipe.profiling import Profile
from sparsepipe.runs.ledger_table import plan_text
from sparsepipe.utils.files import markdown_table

TOTAL_GOAL, PLAN_GOAL, STEP_GOAL = 0.10, 0.03, 0.10


@dataclass(frozen=True, slots=True)
class Taken:
    """One profile and what comes of it."""

    profile: Profile
    problem: Problem
    solution: Solution

    @classmethod
    def of(cls, profile: Profile, *, devices: int, bandwidth_bytes_per_s: float) -> Taken:
        """With the plan for as many devices like the measured one."""
        host = {"name": "here", "devices": [{"name": "device", "count": devices}]}
        problem = Problem.of(
            Inventory.from_dict({"hosts": [host]}),
            {"device": profile},
            model=cost_model("sparsepipe_hete"),
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )
        return cls(profile, problem, hete_mp(problem))

    @property
    def step_s(self) -> float:
        """Of the whole network."""
        return float(self.profile.meta["step_s"])

    @property
    def plan(self) -> str:
        """In words."""
        return plan_text(self.solution.config, [s.first for s in self.solution.stages[1:]])

    def cost_s(self, solution: Solution) -> float:
        """The bottleneck of a plan by this profile."""
        problem = self.problem
        return bottleneck_s(solution.stages, problem.spans, problem.pool, problem.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far profiles of one device are apart, as shares.

    Attributes:
        totals: the largest sum of layers and update over the smallest, less 1.
        plans: what the dearest of their plans costs more by another profile than that one's own.
        layers_off_step: the sum of layers over the measured step, less 1, of the worst.
    """

    totals: float
    plans: float
    layers_off_step: float


def apart_of(taken: Sequence[Taken]) -> Apart:
    """Of several profiles."""
    totals_s = [one.profile.compute_s + (one.profile.update_s or 0.0) for one in taken]
    return Apart(
        totals=max(totals_s) / min(totals_s) - 1,
        plans=max(
            one.cost_s(other.solution) / one.cost_s(one.solution) - 1
            for one in taken
            for other in taken
        ),
        layers_off_step=max(abs(one.profile.compute_s / one.step_s - 1) for one in taken),
    )


def take(number: int, outputs: Path, overrides: Sequence[str]) -> Profile:
    """One profile by the command line."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "sparsepipe", "task=profile", *overrides),
            f"name=profile{number}",
            f"paths.outputs={outputs}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Profile.load(Path(ran.stdout.splitlines()[-1]) / "profile.json")


def report(taken: Sequence[Taken]) -> bool:
    """Prints all figures; whether the goals are met."""
    rows = [
        (
            str(number),
            f"{1e3 * one.profile.compute_s:.1f}",
            f"{1e3 * one.step_s:.1f}",
            f"{1e3 * (one.profile.update_s or 0.0):.1f}",
            f"{one.profile.compute_s / one.step_s:.1%}",
            one.plan,
            f"{1e3 * one.cost_s(one.solution):.1f}",
        )
        for number, one in enumerate(taken, start=1)
    ]
    head = (
        "profile",
        "layers ms",
        "step ms",
        "update ms",
        "layers / step",
        "plan",
        "bottleneck ms",
    )
    print(markdown_table(head, rows))
    apart = apart_of(taken)
    met = [
        _verdict("totals lie apart by", apart.totals, TOTAL_GOAL),
        _verdict("a plan by another profile costs more by", apart.plans, PLAN_GOAL),
        _verdict("layers differ from the step by", apart.layers_off_step, STEP_GOAL),
    ]
    return all(met)


def _verdict(what: str, value: float, goal: float) -> bool:
    print(f"{what} {value:.1%}, goal {goal:.0%}: {'met' if value <= goal else 'MISSED'}")
    return value <= goal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the command sparsepipe task=profile")
    parser.add_argument("--profiles", type=int, default=2, help="how many are taken (2)")
    parser.add_argument("--devices", type=int, default=2, help="to plan for (2)")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes/s (1.25e9)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        profiles = [take(n, Path(name), options.overrides) for n in range(options.profiles)]
    taken = [
        Taken.of(one, devices=options.devices, bandwidth_bytes_per_s=options.bandwidth)
        for one in profiles
    ]
    sys.exit(0 if report(taken) else 1)


if __name__ == "__main__":
    main()
