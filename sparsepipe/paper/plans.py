"""The paper's model on the paper's GPUs, and the splits that its Table III prints, as plans.

``sparsepipe/assets/plans/paper`` holds the plans of its MP, which ``experiment=table3`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import yaml

from sparsepipe.cluster import Inventory
from sparsepipe.config.compose import config_dir
from sparsepipe.paper.printed import printed, stages_of
from sparsepipe.partition.costs.model import bottleneck_s, cost_model
from sparsepipe.partition.devices import Choice, Counts, DeviceKind
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.problem import Problem, Solution, as_uniform, assign_in_order
from sparsepipe.partition.search.algorithms import best_cuts
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

MODEL = "sparse_vgg16_bn"
MP_DEVICE = "RTX 2080 Ti"
"""The GPU whose profile MP uses for all GPUs."""


def paper_inventory(gpus: int) -> Inventory:
    """The GPUs of a row of Table III."""
    path = config_dir() / "hardware" / f"paper_{gpus}gpu.yaml"
    return Inventory.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))["value"])


def paper_problem(gpus: int, model: str, bandwidth: float) -> Problem:
    """The partition problem of the paper's GPUs, with links of ``bandwidth`` bytes/s."""
    inventory, profiles = _inputs(gpus)
    return Problem.of(
        inventory,
        profiles,
        model=cost_model(model),
        bandwidth_bytes_per_s=bandwidth,
    )


@cache
def _inputs(gpus: int) -> tuple[Inventory, dict[str, Profile]]:
    """Cached: tables need them many times."""
    inventory = paper_inventory(gpus)
    return inventory, load_profiles(inventory, MODEL, given={})


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """Stages of a row of Table III: GPUs of MP's, devices of HETE-MP's; its first stage has layers
    0 to 23 (section 5.4).
    """

    mp: str
    hete_mp: tuple[str, ...]

    @property
    def hete_config(self) -> str:
        return "-".join(str(sum(_numbers(stage).values())) for stage in self.hete_mp)


_NAMES = {"TitanV": "TITAN V", "TitanXP": "TITAN Xp", "RTX": "RTX 2080 Ti"}
"""Names in the inventories by those of the table, in the order of the inventories."""


def _paper_rows() -> Iterator[tuple[int, PaperRow]]:
    rows = {(int(row["num_gpus"]), row["strategy"]): row for row in printed("table3")}
    for gpus in dict.fromkeys(gpus for gpus, _ in rows):
        stages = stages_of(rows[gpus, "HETE-MP"]["stage_assignment"])
        yield (
            gpus,
            PaperRow(mp=rows[gpus, "MP"]["split_config"], hete_mp=tuple(map(_devices, stages))),
        )


def _devices(stage: str) -> str:
    """A stage such as ``4 RTX + 3 TitanXP`` by the names and in the order of the inventories."""
    counts = {name: number for number, name in (part.split(" ") for part in stage.split(" + "))}
    return " + ".join(f"{counts[name]} x {ours}" for name, ours in _NAMES.items() if name in counts)


PAPER: Mapping[int, PaperRow] = dict(_paper_rows())
"""Rows of Table III by the number of GPUs."""
CUT = 24
"""First layer of the second stage of HETE-MP; the paper prints it for 8 GPUs. It prints no cut
behind that: the third stage of its row of 6 GPUs may begin anywhere."""


def hete_mp_s(problem: Problem, row: PaperRow) -> float:
    """The bottleneck of the paper's plan of HETE-MP; where it prints no cut, with the best one."""
    groups = [_counts(stage, problem.pool.kinds) for stage in row.hete_mp]
    return min(
        bottleneck_s(plan, problem.spans, problem.pool, problem.model)
        for plan in _plans(groups, problem.spans.num_layers)
    )


def _plans(groups: list[Counts], num_layers: int) -> Iterator[list[Choice]]:
    for others in combinations(range(CUT + 1, num_layers), len(groups) - 2):
        bounds = [0, CUT, *others, num_layers]
        yield [
            Choice(first=bounds[s], end=bounds[s + 1], counts=counts)
            for s, counts in enumerate(groups)
        ]


def _counts(stage: str, kinds: tuple[DeviceKind, ...]) -> Counts:
    numbers = _numbers(stage)
    return tuple(numbers.get(kind.name, 0) for kind in kinds)


def _numbers(stage: str) -> dict[str, int]:
    """Devices of a stage by name, from words such as ``2 x TITAN Xp + 4 x RTX 2080 Ti``."""
    parts = [part.split(" x ") for part in stage.split(" + ")]
    return {name: int(number) for number, name in parts}


def best_paper_cuts(problem: Problem, gpus: int) -> Solution:
    """The best plan that splits as Table III prints."""
    return best_cuts(problem, [(int(number),) for number in PAPER[gpus].mp.split("-")])


def paper_mp_plan(
    gpus: int, *, model: str = "sparsepipe_mp", bandwidth_bytes_per_s: float = 60e6
) -> Plan:
    """The paper's MP on its GPUs.

    Stages take them in the order in which Table III lists them, as MP by our own search does:
    TITAN V, TITAN Xp, RTX 2080 Ti.
    """
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
