"""Training steps whose memory is counted: within a budget, above it, and shared by ranks."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.launch.job import run_job
from sparsepipe.utils.files import read_json, write_json
from tests.integration.test_results import check
from tests.integration.test_smoke_exhibits import run
from tests.support.command_line import composed

ROW = ("experiment=bigconv", "scale=smoke", "paper/network=cnn2d", "paper.workers=one")
SIZES = "task.sizes=[[32,32],[64,64]]"


@pytest.fixture(autouse=True)
def one_thread(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measured(*overrides: str) -> tuple[Path, dict[str, Any]]:
    path = run_job(composed(*ROW, SIZES, *overrides)).path
    return path, read_json(path / "result.json")


def test_a_size_above_the_budget_is_counted_and_not_trained() -> None:
    path, result = measured("task.budget_bytes=1e6", "task.timed_steps=1")
    check(path)
    assert "MASTER_PORT" not in os.environ, "the next ranks of this process could not meet"
    small, large = result["measured_sizes"]
    assert small["fits"]
    assert small["step_s"] > 0
    assert 0 < small["saved_bytes"] < small["peak_bytes"] <= 1e6 < large["peak_bytes"]
    assert (large["fits"], large["limited_by"], "step_s" in large) == (False, "over_budget", False)
    assert (result["largest_size"], result["refused_size"]) == ([32, 32], [64, 64])
    assert result["step_memory_bytes"] == small["peak_bytes"]
    assert (result["strategy"], small["grid"]) == ("spatial", [1, 1])


def test_an_interrupted_run_keeps_the_sizes_that_it_has() -> None:
    path, result = measured()
    kept = path / "steps_32x32.json"
    write_json(kept, {**read_json(kept), "peak_bytes": 7})
    (path / "DONE.json").unlink()
    again, resumed = measured()
    assert again == path
    assert resumed["measured_sizes"][0]["peak_bytes"] == 7
    assert resumed["measured_sizes"][1:] == result["measured_sizes"][1:]


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_a_sample_that_one_device_cannot_hold_trains_on_four() -> None:
    """With the same losses, and what each keeps is its share."""
    alone = measured("task.budget_bytes=1e6")[1]["measured_sizes"][1]
    words = ("parallel.devices=4", "parallel.grid=[2,2]", "task.budget_bytes=1e6")
    shared = measured(*words)[1]["measured_sizes"][1]
    assert (alone["fits"], shared["fits"], shared["grid"]) == (False, True, [2, 2])
    assert shared["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert shared["saved_bytes"] <= 1.05 * alone["saved_bytes"] / 4


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("experiment", "quantities"),
    [
        ("bigconv", {"memory", "over_one", "share", "saved", "largest"}),
        ("convnext_tp", {"memory", "over_one", "share", "saved", "largest"}),
        ("multi_dsn_memory", {"memory", "over_two", "saved"}),
        ("multi_dsn", {"source_only", "dsn", "gain"}),
    ],
)
def test_the_smallest_sweep_ends_with_a_report_that_lacks_nothing(
    workplace: Path, experiment: str, quantities: set[str]
) -> None:
    assert len(run(workplace, f"sparsepipe -m experiment={experiment} scale=smoke")) == 2
    (file,) = workplace.glob(f"outputs/{experiment}/sweeps/*/report/{experiment}.csv")
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["quantity"] for row in rows} >= quantities
    assert "missing" not in {row["status"] for row in rows}
    assert file.with_suffix(".png").exists()
