"""The task ``table3``: the paper's Table III from its authors' own measurements.

Zhai et al., SparsePipe, Table III: how MP (PipeDream's optimizer) and HETE-MP split a sparse
VGG16 with batch normalization over 5 to 8 GPUs of three kinds. The profiles and the inventories
are those of ``hardware=paper_5gpu`` to ``paper_8gpu``. The paper prints no bandwidth, so that one
is assumed for the whole table, and a second table shows what others yield.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

from sparsepipe.paper.plans import (
    CUT,
    MODEL,
    MP_DEVICE,
    PAPER,
    best_paper_cuts,
    hete_mp_s,
    paper_inventory,
    paper_mp_plan,
    paper_problem,
)
from sparsepipe.partition.costs.model import EQUAL, bottleneck_s
from sparsepipe.partition.devices import devices_text
from sparsepipe.partition.problem import Problem, Solution, as_uniform
from sparsepipe.partition.search.algorithms import exact, hete_mp, mp
from sparsepipe.planning.device_profiles import fingerprint_of
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import write_text_atomic
from sparsepipe.utils.tables import markdown_table, write_csv

log = logging.getLogger(__name__)

_KEPT = ("config", "devices", "layers", "bottleneck_ms", "paper_bottleneck_ms", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table3(Task):
    """The paper's Table III from its authors' own measurements.

    Attributes:
        bandwidth_bytes_per_s: of all links, for the whole table.
        mp_cost_model: for all rows of MP.
        hete_cost_model: for all rows of HETE-MP.
        order: of HETE-MP's list of devices, for all rows.
        exact_cost_model: with which ``exact`` is also compared with HETE-MP.
        exact_bandwidths_bytes_per_s: at which it is; None: 60 MB/s to 10 GB/s.
        bandwidths_bytes_per_s: of the second table; None: 50 to 125 MB/s.
        orders: of the second table; None: by_count and by_speed.
    """

    alone: ClassVar[bool] = True
    cores: ClassVar[int | None] = 1

    bandwidth_bytes_per_s: float = 60e6
    mp_cost_model: str = "sparsepipe_mp"
    hete_cost_model: str = "sparsepipe_hete"
    order: str = "by_count"
    exact_cost_model: str = "4_whole"
    exact_bandwidths_bytes_per_s: list[float] | None = None
    bandwidths_bytes_per_s: list[float] | None = None
    orders: list[str] | None = None

    def run(self, run: ResolvedRun) -> None:
        """Writes the tables, the effect of other settings, and the paper's MP as plans."""
        rows = _plan_rows(
            self.mp_cost_model, self.hete_cost_model, self.bandwidth_bytes_per_s, self.order
        )
        others = [
            _yields(strategy, model, order_, speed)
            for strategy, model, order_ in _settings(
                self.mp_cost_model, self.hete_cost_model, self.orders
            )
            for speed in self.bandwidths_bytes_per_s
            or [50e6, 55e6, 60e6, 65e6, 100e6, 110e6, 125e6]
        ]
        gains = [
            _gain(gpus, self.exact_cost_model, speed, self.order)
            for speed in self.exact_bandwidths_bytes_per_s or [60e6, 100e6, 1.25e9, 10e9]
            for gpus in PAPER
        ]
        _write(run, rows, others, gains)
        _write_plans(run, self.mp_cost_model, self.bandwidth_bytes_per_s)
        verdicts = [row["verdict"] for row in rows]
        counts = {
            "rows": len(rows),
            "rows_equal": verdicts.count("equal"),
            "rows_co_optimal": verdicts.count("co-optimal"),
        }
        write_result(run, {"kind": "simulated", **counts, **_flat(rows)})

    def prepare(self, run: ResolvedRun) -> str:
        """A fingerprint of the inventories and profiles."""
        del run
        return "-".join(fingerprint_of(paper_inventory(gpus), MODEL, given={}) for gpus in PAPER)


def _flat(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{row['gpus']}gpu/{row['strategy']}/{name}": row[name] for row in rows for name in _KEPT
    }


def _plan_rows(
    mp_model: str, hete_model: str, bandwidth: float, order: str
) -> list[dict[str, Any]]:
    return [
        row
        for gpus in PAPER
        for row in (
            _mp_row(gpus, mp_model, bandwidth),
            {
                **_hete_row(gpus, hete_model, bandwidth, order),
                **_gains_of(gpus, hete_model, bandwidth, order),
            },
        )
    ]


def _settings(
    mp_model: str, hete_model: str, orders: Sequence[str] | None
) -> Iterator[tuple[str, str, str]]:
    """Strategies, cost models and orders of the second table."""
    yield "MP", mp_model, ""
    for model in dict.fromkeys((hete_model, "4_whole", "eq4")):
        for order in orders or ("by_count", "by_speed"):
            yield "HETE-MP", model, order


def _write(
    run: ResolvedRun,
    rows: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    gains: Sequence[Mapping[str, Any]],
) -> None:
    text = _document(run.spec.task.arguments, rows, others, gains)
    log.info("%s", text)
    write_csv(run.directory.path / "table.csv", rows)
    write_csv(run.directory.path / "settings.csv", others)
    write_csv(run.directory.path / "exact.csv", gains)
    write_text_atomic(run.directory.path / "table.md", text + "\n")


def _write_plans(run: ResolvedRun, model: str, bandwidth: float) -> None:
    for gpus in PAPER:
        plan = paper_mp_plan(gpus, model=model, bandwidth_bytes_per_s=bandwidth)
        write_text_atomic(run.directory.path / f"mp_{gpus}gpu.json", plan.to_json())


def _bottleneck_s(problem: Problem, solution: Solution) -> float:
    return bottleneck_s(solution.stages, problem.spans, problem.pool, problem.model)


def _mp_row(gpus: int, model: str, bandwidth: float) -> dict[str, Any]:
    problem = as_uniform(paper_problem(gpus, model, bandwidth), MP_DEVICE)
    ours = mp(problem, device=MP_DEVICE)
    printed = best_paper_cuts(problem, gpus)
    ours_s, printed_s = _bottleneck_s(problem, ours), _bottleneck_s(problem, printed)
    return {
        **_first(gpus, "MP", problem, ours, ours_s),
        "paper_config": PAPER[gpus].mp,
        "paper_devices": "",
        "paper_layers": _layers(printed),
        "paper_bottleneck_ms": 1e3 * printed_s,
        "verdict": _verdict(ours.stages == printed.stages, printed_s, ours_s),
        "exact_gain": "",
        "exact_gain_over_best_order": "",
    }


def _hete_row(gpus: int, model: str, bandwidth: float, order: str) -> dict[str, Any]:
    problem = paper_problem(gpus, model, bandwidth)
    ours = hete_mp(problem, order=order)
    ours_s = _bottleneck_s(problem, ours)
    printed_devices = PAPER[gpus].hete_mp
    devices = tuple(devices_text(stage.counts, problem.pool.kinds) for stage in ours.stages)
    same = devices == printed_devices and ours.stages[0].end == CUT
    printed_s = hete_mp_s(problem, PAPER[gpus])
    # Of more than two stages the paper prints no cut behind the first.
    second = f"{CUT}-{problem.spans.num_layers - 1}" if len(printed_devices) == 2 else "..."
    return {
        **_first(gpus, "HETE-MP", problem, ours, ours_s),
        "paper_config": PAPER[gpus].hete_config,
        "paper_devices": ", ".join(printed_devices),
        "paper_layers": f"0-{CUT - 1}, {second}",
        "paper_bottleneck_ms": 1e3 * printed_s,
        "verdict": _verdict(same, printed_s, ours_s),
    }


def _gains_of(gpus: int, model: str, bandwidth: float, order: str) -> dict[str, Any]:
    gain = _gain(gpus, model, bandwidth, order)
    return {
        "exact_gain": gain["gain"],
        "exact_gain_over_best_order": gain["gain_over_best_order"],
    }


def _first(
    gpus: int, strategy: str, problem: Problem, ours: Solution, ours_s: float
) -> dict[str, Any]:
    kinds = problem.pool.kinds
    return {
        "gpus": gpus,
        "strategy": strategy,
        "config": ours.config,
        "layers": _layers(ours),
        "devices": f"{', '.join(ours.config.split('-'))} (all count as {MP_DEVICE})"
        if strategy == "MP"
        else ", ".join(devices_text(stage.counts, kinds) for stage in ours.stages),
        "bottleneck_ms": 1e3 * ours_s,
    }


def _best_order_s(problem: Problem) -> float:
    """The bottleneck of HETE-MP with the best order of kinds."""
    names = [f"{kind.host}/{kind.name}" for kind in problem.pool.kinds]
    return min(
        _bottleneck_s(problem, hete_mp(problem, order=list(order))) for order in permutations(names)
    )


def _gain(gpus: int, model: str, bandwidth: float, order: str) -> dict[str, Any]:
    """How much faster ``exact`` is than HETE-MP in its order, and in the best order of kinds."""
    problem = paper_problem(gpus, model, bandwidth)
    heuristic, best = hete_mp(problem, order=order), exact(problem)
    heuristic_s, best_s = _bottleneck_s(problem, heuristic), _bottleneck_s(problem, best)
    kinds = problem.pool.kinds
    return {
        "cost_model": model,
        "bandwidth_mb_per_s": bandwidth / 1e6,
        "gpus": gpus,
        "hete_mp": heuristic.config,
        "hete_mp_ms": 1e3 * heuristic_s,
        "exact": "; ".join(stage.text(kinds) for stage in best.stages),
        "exact_ms": 1e3 * best_s,
        "gain": heuristic_s / best_s,
        "gain_over_best_order": _best_order_s(problem) / best_s,
    }


def _yields(strategy: str, model: str, order: str, bandwidth: float) -> dict[str, Any]:
    """The paper's rows that result from these settings."""
    rows = [
        _mp_row(gpus, model, bandwidth)
        if strategy == "MP"
        else _hete_row(gpus, model, bandwidth, order)
        for gpus in PAPER
    ]
    return {
        "strategy": strategy,
        "cost_model": model,
        "order": order,
        "bandwidth_mb_per_s": bandwidth / 1e6,
        **{f"{row['gpus']} GPUs": row["verdict"] for row in rows},
    }


def _verdict(same: bool, printed_s: float, ours_s: float) -> str:
    """The paper's plan compared with ours by our cost model."""
    if same:
        return "equal"
    if math.isclose(printed_s, ours_s, rel_tol=EQUAL):
        return "co-optimal"
    return "the paper's is better" if printed_s < ours_s else "differs"


def _layers(solution: Solution) -> str:
    return ", ".join(f"{stage.first}-{stage.end - 1}" for stage in solution.stages)


def _document(
    task: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    gains: Sequence[Mapping[str, Any]],
) -> str:
    return "\n\n".join(
        [
            f"Table III at {task['bandwidth_bytes_per_s'] / 1e6:g} MB/s between all GPUs; MP: "
            f"cost model {task['mp_cost_model']}, profile of the {MP_DEVICE}; HETE-MP: cost model "
            f"{task['hete_cost_model']}, order {task['order']}. Bottlenecks are computed from the "
            "authors' measured layer times.",
            _shown(rows),
            "Rows of the paper that other settings yield:",
            _shown(others),
            "What any devices in any stage (exact) would gain over HETE-MP:",
            _shown(gains),
        ]
    )


def _shown(rows: Sequence[Mapping[str, Any]]) -> str:
    head = [name.replace("_", " ") for name in rows[0]]
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return markdown_table(head, cells)
