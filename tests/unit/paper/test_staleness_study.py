"""The staleness study's table and figure, from made-up runs."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from sparsepipe.utils.files import write_json

STUDY = Path(__file__).parents[3] / "experiments" / "staleness"


def make_run(
    outputs: Path,
    name: str,
    mode: str,
    rate: float,
    seed: int,
    accuracy: float,
    *,
    done: bool = True,
) -> None:
    path = outputs / name / f"{mode}-{rate:g}-{seed}"
    path.mkdir(parents=True)
    result: dict[str, Any] = {"seed": seed, "optim.optimizer.lr": rate, "test/accuracy": accuracy}
    if mode != "synchronous":
        result["parallel.strategy.mode"] = mode
    write_json(path / "result.json", result)
    with (path / "metrics.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["epoch", "step", "time/epoch_s", "train/loss", "val/accuracy"])
        for epoch in range(3):
            writer.writerow([epoch, epoch, 10, 3 - epoch, accuracy - 0.1 * (2 - epoch)])
    if done:
        (path / "DONE.json").write_text("{}")


def draw(outputs: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SPARSEPIPE_OUTPUTS": str(outputs)},
    )


def test_each_mode_gets_the_rate_that_it_does_best_with(tmp_path: Path) -> None:
    grid = {"stash": {0.01: 0.5, 0.03: 0.7, 0.1: 0.6}, "synchronous": {0.01: 0.8, 0.03: 0.8}}
    for mode, rates in grid.items():
        for rate, accuracy in rates.items():
            make_run(tmp_path, "staleness_grid", mode, rate, 0, accuracy)
    make_run(tmp_path, "staleness_grid", "stash", 0.3, 0, 0.99, done=False)
    script = Path(shutil.copy(STUDY / "draw.py", tmp_path))  # it writes beside itself
    assert "0.03: 70.0 %" in draw(tmp_path, script, "rates").stdout
    elsewhere = tmp_path / "nothing"  # what the grid found is kept beside the script
    assert draw(elsewhere, script, "rate", "stash").stdout == "0.03\n"
    assert draw(elsewhere, script, "rate", "synchronous").stdout == "0.01\n"
    assert "0.03: 70.0 %" in draw(elsewhere, script, "rates").stdout
    missing = draw(tmp_path, script, "rate", "none")
    assert missing.returncode != 0
    assert "run the grid" in missing.stderr


def test_table_and_figure_show_every_finished_run(tmp_path: Path) -> None:
    accuracies = {"synchronous": (0.90, 0.92), "spectrain": (0.88, 0.90, 0.92)}
    for mode, tests in accuracies.items():
        for seed, accuracy in enumerate(tests):
            make_run(tmp_path / "outputs", "staleness", mode, 0.03, seed, accuracy)
    script = Path(shutil.copy(STUDY / "draw.py", tmp_path))  # it writes beside itself
    ran = draw(tmp_path / "outputs", script, "study")
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
