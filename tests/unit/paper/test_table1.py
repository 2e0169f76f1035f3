"""The task table1: a measured column beside the paper's."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import places
from sparsepipe.errors import ConfigError
from sparsepipe.paper.table1 import table
from sparsepipe.profiling.timing import Speed
from sparsepipe.utils.files import read_json

TABLE = ("task=paper/table1", "task.matrix_size=64", "task.copy_bytes=1048576", "task.repeats=5")
# The paper's Table I: of each kind how many, single-precision TFLOP/s, GB, GB/s.
PAPER = {
    "TITAN V": ("1", 13.8, 12, 653),
    "TITAN Xp": ("3", 12.1, 12, 547),
    "RTX 2080 Ti": ("4", 13.4, 11, 352),
}


def test_the_papers_gpus_beside_what_is_measured(job) -> None:
    path: Path = job(*TABLE)
    with (path / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for name, (count, *figures) in PAPER.items():
        column = [row[f"{name} (paper)"] for row in rows]
        assert (column[0], [float(cell) for cell in column[1:]]) == (count, figures)
    result = read_json(path / "result.json")
    (ours,) = [name for name in rows[0] if name.endswith("(measured here)")]
    assert result["measured_device"] in ours
    for row, rate, spread, scale in (
        (rows[1], "flops_per_s", "flops_spread_per_s", 1e12),
        (rows[3], "copied_bytes_per_s", "copied_spread_bytes_per_s", 1e9),
    ):
        assert result[rate] > 0
        told, _, around = row[ours].partition(" ± ")
        assert float(told) == pytest.approx(result[rate] / scale, rel=0.01)
        assert float(around) == pytest.approx(result[spread] / scale, rel=0.01)
    text = (path / "table.md").read_text()
    assert "64 by 64" in text
    assert "1,048,576 bytes" in text
    assert (result["kind"], result["task_name"]) == ("measured", "table1")


def test_which_device_must_be_known(job) -> None:
    with pytest.raises(ConfigError, match="several kinds of devices"):
        job(*TABLE, "hardware=two_speeds")
    with pytest.raises(ConfigError, match=r"task\.repeats' must be greater than or equal to 1"):
        job(*TABLE[:-1], "task.repeats=0")


@pytest.mark.parametrize(("second", "whole"), [(6_000_000_000, "14"), (None, "")])
def test_a_host_of_unlike_processors_has_the_memory_of_all_its_kinds(
    second: int | None, whole: str
) -> None:
    kinds = [
        {"name": "fast", "count": 2, "accelerator": "cpu", "memory_bytes": 4_000_000_000},
        {"name": "slow", "count": 1, "accelerator": "cpu", "memory_bytes": second},
    ]
    inventory = Inventory.from_dict({"hosts": [{"name": "here", "devices": kinds}]})
    speed = Speed(per_s=1e9, spread_per_s=1e6)
    for place in places(inventory):
        rows = table(place, inventory, multiplied=speed, copied=speed)
        (memory,) = [row for row in rows if row[""] == "memory (GB)"]
        (ours,) = [cell for name, cell in memory.items() if name.endswith("(measured here)")]
        assert ours == whole
