"""What the paper's Table III prints, and what it costs on its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from sparsepipe.partition.costs.model import bottleneck_s
from sparsepipe.partition.devices import Choice, Counts, Kind
from sparsepipe.partition.problem import Problem
from sparsepipe.results.paper import printed, stages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """What Table III prints for a number of GPUs; the cuts are of the text (section 5.4).

    Attributes:
        mp: GPUs of each stage.
        hete_mp: devices of each stage, in words; the layers of the first stage are 0 to 23.
    """

    mp: str
    hete_mp: tuple[str, ...]

    @property
    def hete_config(self) -> str:
        """GPUs of each stage of HETE-MP."""
        return "-".join(str(sum(_numbers(stage).values())) for stage in self.hete_mp)


_NAMES = {"TitanV": "TITAN V", "TitanXP": "TITAN Xp", "RTX": "RTX 2080 Ti"}
"""Of the inventories by those of the table, in the order of the inventories."""


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
"""By the number of GPUs."""
CUT = 24
"""First layer of the second stage of HETE-MP; the paper prints it for 8 GPUs. It prints no cut
behind that: the third stage of its row of 6 GPUs may begin anywhere."""


def hete_mp_s(problem: Problem, row: PaperRow) -> float:
    """The bottleneck of the paper's plan of HETE-MP; where it prints no cut, with the best one."""
    groups = [_counts(stage, problem.fleet.kinds) for stage in row.hete_mp]
    return min(
        bottleneck_s(plan, problem.spans, problem.fleet, problem.model)
        for plan in _plans(groups, problem.spans.num_layers)
    )


def _plans(groups: list[Counts], num_layers: int) -> Iterator[list[Choice]]:
    for others in combinations(range(CUT + 1, num_layers), len(groups) - 2):
        bounds = [0, CUT, *others, num_layers]
        yield [
            Choice(first=bounds[s], end=bounds[s + 1], counts=counts)
            for s, counts in enumerate(groups)
        ]


def _counts(stage: str, kinds: tuple[Kind, ...]) -> Counts:
    numbers = _numbers(stage)
    return tuple(numbers.get(kind.name, 0) for kind in kinds)


def _numbers(stage: str) -> dict[str, int]:
    """Devices of a stage by name, from words such as ``2 x TITAN Xp + 4 x RTX 2080 Ti``."""
    parts = [part.split(" x ") for part in stage.split(" + ")]
    return {name: int(number) for number, name in parts}
