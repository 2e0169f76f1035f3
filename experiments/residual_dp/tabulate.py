"""Where is data parallelism the best plan for four like devices? Table of the profiles beside it.

    python experiments/residual_dp/tabulate.py

For each profile and bandwidth: the best of all plans (`exact`), its time for a minibatch, that of
data parallelism, and their ratio, by the cost model `sparsepipe_hete` without limits of memory;
as `sparsepipe task=partition task.search=exact task.memory=false` computes them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.algorithms import exact
from sparsepipe.profiling import Profile
from sparsepipe.runs.ledger_table import plan_text
from sparsepipe.utils.files import markdown_table, write_csv

HERE = Path(__file__).parent
DEVICES = 4
BANDWIDTHS_BYTES_PER_S = (125e6, 250e6, 500e6, 1.25e9, 2.5e9, 5e9, 12e9)


def row(name: str, profile: Profile, bandwidth_bytes_per_s: float) -> dict[str, Any]:
    """The best plan beside data parallelism."""
    hosts = [{"name": "host", "devices": [{"name": "device", "count": DEVICES}]}]
    problem = Problem.of(
        Inventory.from_dict({"hosts": hosts}),
        {"device": profile},
        model=cost_model("sparsepipe_hete"),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    told = explain(problem, exact(problem))
    assert told.dp_s is not None
    return {
        "profile": name,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
        "plan": plan_text(told.solution.config, [stage.first for stage in told.rows[1:]]),
        "bottleneck_s": told.bottleneck_s,
        "dp_s": told.dp_s,
        "gain_over_dp": told.dp_s / told.bottleneck_s,
    }


def main() -> None:
    """Writes ``table.csv`` and prints the same to read."""
    rows = [
        row(path.stem, Profile.load(path), bandwidth)
        for path in sorted((HERE / "profiles").glob("*.json"))
        for bandwidth in BANDWIDTHS_BYTES_PER_S
    ]
    write_csv(HERE / "table.csv", rows)
    head = ("profile", "MB/s", "best plan", "ms", "DP ms", "gain over DP")
    cells = [
        (
            found["profile"],
            f"{found['bandwidth_bytes_per_s'] / 1e6:,.0f}",
            found["plan"],
            f"{1e3 * found['bottleneck_s']:.0f}",
            f"{1e3 * found['dp_s']:.0f}",
            f"{found['gain_over_dp']:.2f}x",
        )
        for found in rows
    ]
    sys.stdout.write(markdown_table(head, cells) + "\n")


if __name__ == "__main__":
    main()
