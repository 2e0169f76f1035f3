"""The task ``table3``: the paper's Table III, computed from its authors' own measurements.

Zhai et al., SparsePipe, Table III: how MP (PipeDream's optimizer) and HETE-MP split a sparse
VGG16 with batch normalization over 5 to 8 GPUs of three kinds (``hardware=paper_5gpu`` to
``paper_8gpu``). The paper prints no bandwidth: one is assumed for the whole table, and a second
table shows the effect of others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
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
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

log = logging.getLogger(__name__)

_KEPT = ("config", "devices", "layers", "bottleneck_ms", "paper_bottleneck_ms", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table3(Task):
    """Computes the paper's Table III from its authors' own measurements.

    Attributes:
        bandwidth_bytes_per_s: bandwidth of all links for the first table.
        mp_cost_model: cost model of MP.
        hete_cost_model: cost model of HETE-MP.
        order: order of devices in HETE-MP's list, such as ``by_count`` or ``by_speed``.
        exact_cost_model: cost model for comparing ``exact`` with HETE-MP.
        exact_bandwidths_bytes_per_s: bandwidths for that comparison; None: 60 MB/s to 10 GB/s.
        bandwidths_bytes_per_s: bandwidths of the second table; None: 50 to 125 MB/s.
        orders: orders of the second table; None: ``by_count`` and ``by_speed``.
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
        """Writes the tables, the effect of other settings, and the paper's plans of MP."""
        rows = []
        for gpus in PAPER:
            rows.append(_mp_row(gpus, self.mp_cost_model, self.bandwidth_bytes_per_s))
            settings = gpus, self.hete_cost_model, self.bandwidth_bytes_per_s, self.order
            gain = _gain(*settings)
            gained = {
                "exact_gain": gain["gain"],
                "exact_gain_over_best_order": gain["gain_over_best_order"],
            }
            rows.append({**_hete_row(*settings), **gained})
        strategies = [("MP", self.mp_cost_model, "")]
        for model in dict.fromkeys((self.hete_cost_model, "4_whole", "eq4")):
            for order in self.orders or ("by_count", "by_speed"):
                strategies.append(("HETE-MP", model, order))
        speeds = self.bandwidths_bytes_per_s or [50e6, 55e6, 60e6, 65e6, 100e6, 110e6, 125e6]
        others = [_yields(*strategy, speed) for strategy in strategies for speed in speeds]
        gains = [
            _gain(gpus, self.exact_cost_model, speed, self.order)
            for speed in self.exact_bandwidths_bytes_per_s or [60e6, 100e6, 1.25e9, 10e9]
            for gpus in PAPER
        ]
        self._write(run, rows, others, gains)
        verdicts = [row["verdict"] for row in rows]
        counts = {
            "rows": len(rows),
            "rows_equal": verdicts.count("equal"),
            "rows_co_optimal": verdicts.count("co-optimal"),
        }
        flat = {
            f"{row['gpus']}gpu/{row['strategy']}/{name}": row[name]
            for row in rows
            for name in _KEPT
        }
        write_result(run, {"kind": "simulated", **counts, **flat})

    def prepare(self, run: ResolvedRun) -> str:
        """A fingerprint of the inventories and profiles."""
        del run
        return "-".join(fingerprint_of(paper_inventory(gpus), MODEL, given={}) for gpus in PAPER)

    def _write(
        self,
        run: ResolvedRun,
        rows: Sequence[Mapping[str, Any]],
        others: Sequence[Mapping[str, Any]],
        gains: Sequence[Mapping[str, Any]],
    ) -> None:
        path, speed = run.directory.path, self.bandwidth_bytes_per_s
        text = "\n\n".join(
            [
                f"Table III at {speed / 1e6:g} MB/s between all GPUs; MP: cost model "
                f"{self.mp_cost_model}, profile of the {MP_DEVICE}; HETE-MP: cost model "
                f"{self.hete_cost_model}, order {self.order}. Bottlenecks are computed from the "
                "authors' measured layer times.",
                _shown(rows),
                "Rows of the paper that other settings yield:",
                _shown(others),
                "What any devices in any stage (exact) would gain over HETE-MP:",
                _shown(gains),
            ]
        )
        log.info("%s", text)
        for name, table in {"table": rows, "settings": others, "exact": gains}.items():
            write_csv(path / f"{name}.csv", table)
        write_text_atomic(path / "table.md", text + "\n")
        for gpus in PAPER:
            plan = paper_mp_plan(gpus, model=self.mp_cost_model, bandwidth_bytes_per_s=speed)
            write_text_atomic(path / f"mp_{gpus}gpu.json", plan.to_json())


def _shown(rows: Sequence[Mapping[str, Any]]) -> str:
    head = [name.replace("_", " ") for name in rows[0]]
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return markdown_table(head, cells)


def _bottleneck_s(problem: Problem, solution: Solution) -> float:
    return bottleneck_s(solution.stages, problem.spans, problem.pool, problem.model)


def _mp_row(gpus: int, model: str, bandwidth: float) -> dict[str, Any]:
    problem = as_uniform(paper_problem(gpus, model, bandwidth), MP_DEVICE)
    ours = mp(problem, device=MP_DEVICE)
    printed = best_paper_cuts(problem, gpus)
    ours_s, printed_s = _bottleneck_s(problem, ours), _bottleneck_s(problem, printed)
    return {
        "gpus": gpus,
        "strategy": "MP",
        "config": ours.config,
        "layers": _layers(ours),
        "devices": f"{', '.join(ours.config.split('-'))} (all count as {MP_DEVICE})",
        "bottleneck_ms": 1e3 * ours_s,
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
    ours_s, printed_s = _bottleneck_s(problem, ours), hete_mp_s(problem, PAPER[gpus])
    printed_devices = PAPER[gpus].hete_mp
    devices = tuple(devices_text(stage.counts, problem.pool.kinds) for stage in ours.stages)
    same = devices == printed_devices and ours.stages[0].end == CUT
    # For more than two stages, the paper prints only the first cut.
    second = f"{CUT}-{problem.spans.num_layers - 1}" if len(printed_devices) == 2 else "..."
    return {
        "gpus": gpus,
        "strategy": "HETE-MP",
        "config": ours.config,
        "layers": _layers(ours),
        "devices": ", ".join(devices),
        "bottleneck_ms": 1e3 * ours_s,
        "paper_config": PAPER[gpus].hete_config,
        "paper_devices": ", ".join(printed_devices),
        "paper_layers": f"0-{CUT - 1}, {second}",
        "paper_bottleneck_ms": 1e3 * printed_s,
        "verdict": _verdict(same, printed_s, ours_s),
    }


def _gain(gpus: int, model: str, bandwidth: float, order: str) -> dict[str, Any]:
    """A row with the speed of ``exact`` over that of HETE-MP, with this order and its best one."""
    problem = paper_problem(gpus, model, bandwidth)
    heuristic, best = hete_mp(problem, order=order), exact(problem)
    heuristic_s, best_s = _bottleneck_s(problem, heuristic), _bottleneck_s(problem, best)
    kinds = problem.pool.kinds
    orders = permutations([f"{kind.host}/{kind.name}" for kind in kinds])
    ordered_s = min(_bottleneck_s(problem, hete_mp(problem, order=list(each))) for each in orders)
    return {
        "cost_model": model,
        "bandwidth_mb_per_s": bandwidth / 1e6,
        "gpus": gpus,
        "hete_mp": heuristic.config,
        "hete_mp_ms": 1e3 * heuristic_s,
        "exact": "; ".join(stage.text(kinds) for stage in best.stages),
        "exact_ms": 1e3 * best_s,
        "gain": heuristic_s / best_s,
        "gain_over_best_order": ordered_s / best_s,
    }


def _yields(strategy: str, model: str, order: str, bandwidth: float) -> dict[str, Any]:
    """A row with these settings and, for each number of GPUs, the verdict on the paper's row."""
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
    """Whether the paper's plan is the ``same`` as ours or, by our cost model, as good or better."""
    if same:
        return "equal"
    if math.isclose(printed_s, ours_s, rel_tol=EQUAL):
        return "co-optimal"
    return "the paper's is better" if printed_s < ours_s else "differs"


def _layers(solution: Solution) -> str:
    return ", ".join(f"{stage.first}-{stage.end - 1}" for stage in solution.stages)
