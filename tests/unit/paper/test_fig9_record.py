"""The record experiments/fig9/fig9.csv: what it is to show, and that it can be made again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from sparsepipe.launch.job import run_job
from sparsepipe.paper.chapters.fig9 import GPUS, STRATEGIES
from tests.support.command_line import composed

RECORD = Path(__file__).parents[3] / "experiments" / "fig9" / "fig9.csv"
SIMULATED_MB_PER_S = (50.0, 100.0, 125.0)
Figure = tuple[str, float, int]
"""Of the record: how it came about, MB/s between hosts, GPUs."""


def record() -> dict[Figure, dict[str, dict[str, str]]]:
    """Rows by figure and strategy."""
    found: dict[Figure, dict[str, dict[str, str]]] = {}
    with RECORD.open(newline="") as stream:
        for row in csv.DictReader(stream):
            assert row["status"] == "finished", row
            figure = row["kind"], float(row["link_mb_per_s"]), int(row["gpus"])
            rows = found.setdefault(figure, {})
            assert row["strategy"] not in rows, "a bar is there once"
            rows[row["strategy"]] = row
    return found


def pace(row: dict[str, str]) -> float:
    return float(row["minibatches_per_s"])


def test_every_simulated_bar_is_there() -> None:
    found = record()
    for link in SIMULATED_MB_PER_S:
        for gpus in GPUS:
            assert set(found["simulated", link, gpus]) == set(STRATEGIES)


def test_mp_and_hete_mp_are_ahead_of_data_parallelism_everywhere() -> None:
    for figure, rows in record().items():
        for strategy in ("mp", "paper_mp", "hete_mp"):
            assert pace(rows[strategy]) > pace(rows["dp"]), (figure, strategy)
    rows = record()["simulated", 125.0, 5]
    assert pace(rows["hete_mp"]) / pace(rows["dp"]) >= 2.4


def test_exact_is_ahead_of_hete_mp_on_seven_and_eight_gpus() -> None:
    compared = [rows for (_, _, gpus), rows in record().items() if gpus in (7, 8)]
    assert len(compared) >= 2 * len(SIMULATED_MB_PER_S)
    for rows in compared:
        assert pace(rows["exact"]) > pace(rows["hete_mp"])


def test_speedups_follow_from_the_paces() -> None:
    for rows in record().values():
        for row in rows.values():
            found = float(row["speedup_over_dp"])
            assert found == pytest.approx(pace(row) / pace(rows["dp"]), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("link", [50, 100, 125])
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bar_comes_out_again(tmp_path: Path, link: int, gpus: int, strategy: str) -> None:
    row = record()["simulated", float(link), gpus][strategy]
    asked = (
        f"task=paper/fig9_simulated_{link}",
        f"hardware=paper_{gpus}gpu",
        f"parallel={strategy}",
    )
    done = run_job(composed(f"paths.outputs={tmp_path}", "experiment=fig9", *asked))
    found = json.loads(done.result.read_text())
    for name in ("minibatches_per_s", "speedup_over_dp", "speedup_over_dp_without_overlap"):
        assert found[name] == pytest.approx(float(row[name]), rel=1e-6), name
    cuts = ", ".join(map(str, found["plan_cuts"]))
    assert row["plan"] == found["plan_config"] + (f" at {cuts}" if cuts else "")
