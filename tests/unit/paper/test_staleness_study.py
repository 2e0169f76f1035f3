"""The staleness study's table and figure, from made-up runs."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.reported_runs import drawn, leave_curves

STUDY = Path(__file__).parents[3] / "experiments" / "staleness"


def make_run(
    outputs: Path, name: str, mode: str, rate: float, seed: int, accuracy: float, **more: bool
) -> None:
    result: dict[str, Any] = {"seed": seed, "optim.optimizer.lr": rate, "test/accuracy": accuracy}
    if mode != "synchronous":
        result["parallel.strategy.mode"] = mode
    curve = [accuracy - 0.1 * (2 - epoch) for epoch in range(3)]
    leave_curves(outputs / name / f"{mode}-{rate:g}-{seed}", result, curve, **more)


def test_each_mode_gets_the_rate_that_it_does_best_with(tmp_path: Path) -> None:
    grid = {"stash": {0.01: 0.5, 0.03: 0.7, 0.1: 0.6}, "synchronous": {0.01: 0.8, 0.03: 0.8}}
    for mode, rates in grid.items():
        for rate, accuracy in rates.items():
            make_run(tmp_path, "staleness_grid", mode, rate, 0, accuracy)
    make_run(tmp_path, "staleness_grid", "stash", 0.3, 0, 0.99, done=False)
    script = Path(shutil.copy(STUDY / "draw.py", tmp_path))  # it writes beside itself
    assert "0.03: 70.0 %" in drawn(tmp_path, script, "rates").stdout
    elsewhere = tmp_path / "nothing"  # what the grid found is kept beside the script
    assert drawn(elsewhere, script, "rate", "stash").stdout == "0.03\n"
    assert drawn(elsewhere, script, "rate", "synchronous").stdout == "0.01\n"
    assert "0.03: 70.0 %" in drawn(elsewhere, script, "rates").stdout
    missing = drawn(tmp_path, script, "rate", "none")
    assert missing.returncode != 0
    assert "run the grid" in missing.stderr


def test_table_and_figure_show_every_finished_run(tmp_path: Path) -> None:
    accuracies = {"synchronous": (0.90, 0.92), "spectrain": (0.88, 0.90, 0.92)}
    for mode, tests in accuracies.items():
        for seed, accuracy in enumerate(tests):
            make_run(tmp_path / "outputs", "staleness", mode, 0.03, seed, accuracy)
    script = Path(shutil.copy(STUDY / "draw.py", tmp_path))  # it writes beside itself
    ran = drawn(tmp_path / "outputs", script, "study")
    assert ran.returncode == 0, ran.stderr
    table = {line.split()[0]: line for line in ran.stdout.splitlines()[1:]}
    assert "91.00 % [90.00 .. 92.00]" in table["synchronous"]
    assert "90.00 % [88.00 .. 92.00]" in table["SpecTrain"]
    assert table.keys() == {"synchronous", "SpecTrain"}
    with (tmp_path / "runs.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["mode"] for row in rows] == ["synchronous"] * 2 + ["spectrain"] * 3
    assert [float(row["test/accuracy"]) for row in rows[:2]] == [0.90, 0.92]
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 1000
