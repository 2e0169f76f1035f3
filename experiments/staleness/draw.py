"""Table and figure of the staleness study, from the runs' own files.

    python experiments/staleness/draw.py rates        validation accuracy by mode and rate
    python experiments/staleness/draw.py rate stash   the best rate of a mode, from rates.csv
    python experiments/staleness/draw.py study        table, curves.png and runs.csv

Runs are looked for in outputs/staleness_grid and outputs/staleness.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sparsepipe.runs.metrics import epoch_series, read_metrics

HERE = Path(__file__).parent
RATES = HERE / "rates.csv"
OUTPUTS = Path(os.environ.get("SPARSEPIPE_OUTPUTS", HERE.parents[1] / "outputs"))
MODES = {
    "synchronous": "synchronous SGD",
    "stash": "weight stashing",
    "vertical_sync": "vertical sync",
    "spectrain": "SpecTrain",
    "none": "none",
}
KEPT = (
    "run_id",
    "seed",
    "optim.optimizer.lr",
    "test/accuracy",
    "val/accuracy",
    "trainer.max_epochs",
    "plan_config",
    "plan_cuts",
    "git_commit",
    "torch",
)

KEPT_OF_GRID = ("run_id", "seed", "trainer.max_epochs", "git_commit", "torch")

Result = dict[str, Any]


def say(line: str) -> None:
    """Prints it."""
    sys.stdout.write(f"{line}\n")


def finished(name: str) -> dict[str, list[tuple[Result, Path]]]:
    """Results and directories of an experiment's finished runs, by mode."""
    found: dict[str, list[tuple[Result, Path]]] = defaultdict(list)
    for done in sorted((OUTPUTS / name).glob("*/DONE.json")):
        result = json.loads((done.parent / "result.json").read_text(encoding="utf-8"))
        mode = result.get("parallel.strategy.mode", "synchronous")
        found[mode].append((result, done.parent))
    return found


def last_accuracy(directory: Path) -> float:
    """Validation accuracy of the last epoch."""
    return epoch_series(read_metrics(directory / "metrics.csv"), "val/accuracy").values[-1]


def by_rate(mode: str) -> dict[float, float]:
    """Last validation accuracy of a mode at each learning rate of the grid."""
    if not RATES.exists():
        return {}
    with RATES.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["mode"] == mode]
    return {float(row["optim.optimizer.lr"]): float(row["val/accuracy"]) for row in rows}


def best_rate(mode: str) -> float:
    """The learning rate that a mode does best with; of equal ones the smallest."""
    rates = by_rate(mode)
    if not rates:
        raise SystemExit(f"no learning rate for {mode} in {RATES}: run the grid")
    return max(sorted(rates), key=lambda rate: rates[rate])


def keep_rates() -> None:
    """A file with a row for each run of the grid; prints a line for each mode."""
    runs = finished("staleness_grid")
    if runs:  # else the file may be all that is left of a grid
        with RATES.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["mode", "optim.optimizer.lr", "val/accuracy", *KEPT_OF_GRID])
            for mode in MODES:
                for r, path in sorted(runs[mode], key=lambda run: run[0]["optim.optimizer.lr"]):
                    told = [r.get(key) for key in KEPT_OF_GRID]
                    writer.writerow([mode, r["optim.optimizer.lr"], last_accuracy(path), *told])
    for mode, label in MODES.items():
        rates = by_rate(mode)
        cells = ", ".join(f"{rate:g}: {100 * rates[rate]:.1f} %" for rate in sorted(rates))
        say(f"{label:18}{cells}")


def study() -> None:
    """Table, figure and a file with a row for each run."""
    from sparsepipe.plots import style  # run.sh asks for rates often
    from sparsepipe.plots.curves import comparison_figure

    runs = finished("staleness")
    say(f"{'':18}{'rate':>7}{'runs':>6}{'test accuracy, mean [least .. largest]':>42}")
    for mode in [mode for mode in MODES if runs[mode]]:
        tests = [100 * result["test/accuracy"] for result, _ in runs[mode]]
        rates = {f"{result['optim.optimizer.lr']:g}" for result, _ in runs[mode]}
        shown = f"{statistics.fmean(tests):.2f} % [{min(tests):.2f} .. {max(tests):.2f}]"
        say(f"{MODES[mode]:18}{'/'.join(sorted(rates)):>7}{len(tests):6}{shown:>42}")
    with (HERE / "runs.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["mode", *KEPT])
        for mode in MODES:
            writer.writerows([mode, *(r.get(key) for key in KEPT)] for r, _ in runs[mode])
    ways = {MODES[mode]: [path / "metrics.csv" for _, path in runs[mode]] for mode in MODES}
    style.save_png(comparison_figure(ways), HERE / "curves.png")


def main() -> None:
    match sys.argv[1:]:
        case ["rates"]:
            keep_rates()
        case ["rate", mode] if mode in MODES:
            say(f"{best_rate(mode):g}")
        case ["study"]:
            study()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
