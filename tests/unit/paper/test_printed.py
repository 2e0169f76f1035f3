"""The paper's figures as the package carries them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsepipe.paper.chapters.fig9 import PRINTED, SMALLEST_HETE_MP
from sparsepipe.paper.plans import PAPER, PaperRow, paper_inventory
from sparsepipe.paper.printed import printed

ROOT = Path(__file__).parents[3]


def test_speedups_of_table2_follow_from_its_epoch_times() -> None:
    rows = printed("table2")
    assert len(rows) == 16
    times = {(r["resolution"], r["num_gpus"], r["network"], r["point_ratio_p"]):
             float(r["epoch_time_s"]) for r in rows}  # fmt: skip
    assert len(times) == 16, "no row is there twice"
    for row in rows:
        first = times[row["resolution"], "1", "dense", "1"]
        own = float(row["epoch_time_s"])
        # As it is printed: two digits behind the point.
        assert float(row["speedup_over_D1_1gpu"]) == pytest.approx(first / own, abs=0.0051)


def test_the_inventory_has_the_gpus_of_table1() -> None:
    """conf/hardware/paper_8gpu.yaml is what simulations and task=paper/table1 take them from."""
    printed_ = {
        (row["server"], row["gpu"].casefold()): (
            int(row["count"]),
            float(row["single_precision_tflops"]),
            float(row["memory_gb"]),
            float(row["memory_bandwidth_gb_per_s"]),
        )
        for row in printed("table1")
    }
    inventory = {
        (host.name.removeprefix("server"), device.name.casefold()): (
            device.count,
            device.tflops,
            (device.memory_bytes or 0) / 1e9,
            (device.memory_bytes_per_s or 0) / 1e9,
        )
        for host in paper_inventory(8).hosts
        for device in host.devices
    }
    assert inventory == printed_


def test_table3_in_the_names_of_the_inventories() -> None:
    assert dict(PAPER) == {
        5: PaperRow(mp="1-2-1-1", hete_mp=("4 x RTX 2080 Ti", "1 x TITAN V")),
        6: PaperRow(mp="4-1-1", hete_mp=("4 x RTX 2080 Ti", "1 x TITAN V", "1 x TITAN Xp")),
        7: PaperRow(mp="4-1-1-1", hete_mp=("2 x TITAN Xp + 4 x RTX 2080 Ti", "1 x TITAN V")),
        8: PaperRow(mp="4-1-1-1-1", hete_mp=("3 x TITAN Xp + 4 x RTX 2080 Ti", "1 x TITAN V")),
    }


def test_derived_figures_of_fig9_are_marked() -> None:
    assert PRINTED[8, "hete_mp"].derived
    assert not PRINTED[5, "hete_mp"].derived
    assert SMALLEST_HETE_MP == 2.41


def test_fig7_follows_from_the_authors_measurements() -> None:
    profile = json.loads((ROOT / "sparsepipe/assets/profiles/paper/titan_xp.json").read_text())
    layers = profile["layers"]
    costs = {
        "compute_percent": [layer["forward_s"] + layer["backward_s"] for layer in layers],
        "activation_percent": [layer["activation_bytes"] for layer in layers],
        "parameter_percent": [layer["parameter_bytes"] for layer in layers],
    }
    poolings = [n for n, layer in enumerate(layers) if layer["kind"] == "MinkowskiMaxPooling"]
    assert [int(row["last_layer"]) for row in printed("fig7")] == poolings
    for row in printed("fig7"):
        for name, values in costs.items():
            share = 100 * sum(values[: int(row["last_layer"]) + 1]) / sum(values)
            assert float(row[name]) == pytest.approx(share, abs=0.006)
