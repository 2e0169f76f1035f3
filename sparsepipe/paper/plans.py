"""The paper's model on the paper's GPUs, and the splits of Table III as plans.

``experiment=table3`` writes the plans of MP, which are kept in ``sparsepipe/assets/plans/paper``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

import yaml

from sparsepipe.cluster import Inventory
from sparsepipe.config.compose import config_dir
from sparsepipe.paper.printed import printed, stages_of
from sparsepipe.partition.costs.model import bottleneck_s, cost_model
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.problem import Problem, Solution, as_uniform, assign_in_order
from sparsepipe.partition.search.algorithms import best_cuts
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

MODEL = "sparse_vgg16_bn"
MP_DEVICE = "RTX 2080 Ti"
"""The GPU model whose profile MP uses for all GPUs."""


def paper_inventory(gpus: int) -> Inventory:
    """The inventory with the ``gpus`` GPUs of a row of Table III."""
    path = config_dir() / "hardware" / f"paper_{gpus}gpu.yaml"
    return Inventory.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))["value"])


def paper_problem(gpus: int, model: str, bandwidth: float) -> Problem:
    """The partition problem of ``gpus`` GPUs; ``model``: cost model; ``bandwidth``: in bytes/s."""
    inventory, profiles = _inputs(gpus)
    chosen = cost_model(model)
    return Problem.of(inventory, profiles, model=chosen, bandwidth_bytes_per_s=bandwidth)


@cache
def _inputs(gpus: int) -> tuple[Inventory, dict[str, Profile]]:
    inventory = paper_inventory(gpus)
    return inventory, load_profiles(inventory, MODEL, given={})


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """The plans in Table III for one number of GPUs: for MP, the number of GPUs of each stage, such
    as ``4-1``; for HETE-MP, the devices of each stage.
    """

    mp: str
    hete_mp: tuple[str, ...]

    @property
    def hete_config(self) -> str:
        return "-".join(str(sum(_numbers(stage).values())) for stage in self.hete_mp)


_NAMES = {"TitanV": "TITAN V", "TitanXP": "TITAN Xp", "RTX": "RTX 2080 Ti"}
"""Names in the inventories by names in the table, in the order of the inventories."""


def _devices(stage: str) -> str:
    """``4 RTX + 3 TitanXP``, for example, as ``3 x TITAN Xp + 4 x RTX 2080 Ti``."""
    counts = {name: number for number, name in (part.split(" ") for part in stage.split(" + "))}
    return " + ".join(f"{counts[name]} x {ours}" for name, ours in _NAMES.items() if name in counts)


_PRINTED = {(int(row["num_gpus"]), row["strategy"]): row for row in printed("table3")}
PAPER: Mapping[int, PaperRow] = {
    gpus: PaperRow(
        mp=row["split_config"],
        hete_mp=tuple(map(_devices, stages_of(_PRINTED[gpus, "HETE-MP"]["stage_assignment"]))),
    )
    for (gpus, strategy), row in _PRINTED.items()
    if strategy == "MP"
}
"""Rows of Table III by the number of GPUs."""
CUT = 24
"""First layer of the second stage of HETE-MP, which the paper prints for 8 GPUs (section 5.4); the
paper prints no other cut."""


def hete_mp_s(problem: Problem, row: PaperRow) -> float:
    """Bottleneck in s of the paper's HETE-MP plan, with the best cuts where none is printed."""
    num_layers, found = problem.spans.num_layers, []
    numbers = [_numbers(stage) for stage in row.hete_mp]
    groups = [tuple(own.get(kind.name, 0) for kind in problem.pool.kinds) for own in numbers]
    for others in combinations(range(CUT + 1, num_layers), len(groups) - 2):
        bounds = pairwise([0, CUT, *others, num_layers])
        plan = [
            Choice(first=first, end=end, counts=counts)
            for (first, end), counts in zip(bounds, groups, strict=True)
        ]
        found.append(bottleneck_s(plan, problem.spans, problem.pool, problem.model))
    return min(found)


def _numbers(stage: str) -> dict[str, int]:
    """Number of devices by name, from text such as ``2 x TITAN Xp + 4 x RTX 2080 Ti``."""
    parts = [part.split(" x ") for part in stage.split(" + ")]
    return {name: int(number) for number, name in parts}


def best_paper_cuts(problem: Problem, gpus: int) -> Solution:
    """The best plan with the number of GPUs in each stage that Table III prints for MP."""
    return best_cuts(problem, [(int(number),) for number in PAPER[gpus].mp.split("-")])


def paper_mp_plan(
    gpus: int, *, model: str = "sparsepipe_mp", bandwidth_bytes_per_s: float = 60e6
) -> Plan:
    """The plan of MP in Table III, on TITAN V first, with the best cuts by cost model ``model``."""
    problem = paper_problem(gpus, model, bandwidth_bytes_per_s)
    best = best_paper_cuts(as_uniform(problem, MP_DEVICE), gpus)
    stages = assign_in_order(best.stages, problem.pool, range(len(problem.pool.kinds)))
    solution = Solution(stages=tuple(stages), strategy="paper_mp")
    return as_plan(
        problem,
        explain(problem, solution),
        model=MODEL,
        device=MP_DEVICE,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        hardware=f"paper_{gpus}gpu",
        source=f"Zhai et al., SparsePipe, Table III, MP on {gpus} GPUs: {PAPER[gpus].mp}; cuts "
        "are the best for it",
    )
