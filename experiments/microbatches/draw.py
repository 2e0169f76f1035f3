"""Table and figure of the study of microbatches, from the runs' own files.

    python experiments/microbatches/draw.py

Runs are looked for in outputs/microbatches, or below what SPARSEPIPE_OUTPUTS names; others than
those of the study are left out. The last lines set pipelines beside gradient accumulation on one
device, seed by seed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsepipe.plots import style
from sparsepipe.plots.curves import comparison_figure

HERE = Path(__file__).parent
OUTPUTS = Path(os.environ.get("SPARSEPIPE_OUTPUTS", HERE.parents[1] / "outputs"))
KEYS = ("strategy", "plan_config", "parallel.strategy.microbatches")
ACCUMULATED = "one device, 4 microbatches"
WAYS = {
    ("single", None, None): "one device, whole minibatches",
    ("sync_1f1b", "1", 4): ACCUMULATED,
    ("gpipe", "1-1", 4): "GPipe, two stages, 4 microbatches",
    ("sync_1f1b", "1-1", 4): "1F1B, two stages, 4 microbatches",
}
SHARES = ("train/accuracy", "val/accuracy", "test/accuracy")
COMPARED = (*SHARES, "train/loss", "val/loss", "test/loss")

Runs = dict[str, dict[int, tuple[Path, dict[str, Any]]]]
"""By their way and their seed: the directory, and the result."""


def main() -> None:
    found = read()
    for label, runs in found.items():
        for name in SHARES:
            values = [100 * result[name] for _, result in runs.values() if name in result]
            if values:
                spread = f"{fmean(values):.2f} % [{min(values):.2f} .. {max(values):.2f}]"
                tell(f"{label:35}{name:16}{len(values)} runs  {spread}")
    for label in list(WAYS.values())[2:]:
        for seed in sorted(found[label].keys() & found[ACCUMULATED].keys()):
            own, other = found[label][seed][1], found[ACCUMULATED][seed][1]
            tell(f"{label:35}seed {seed}: {difference(own, other)}")
    ways = {
        label: [path / "metrics.csv" for path, _ in runs.values()]
        for label, runs in found.items()
        if runs
    }
    style.save_png(comparison_figure(ways), HERE / "curves.png")


def read() -> Runs:
    """The finished runs of the study; of one way and seed the one that comes last by its name."""
    found: Runs = {label: {} for label in WAYS.values()}
    for done in sorted((OUTPUTS / "microbatches").glob("*/DONE.json")):
        path = done.parent
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
        label = WAYS.get(tuple(result.get(key) for key in KEYS))
        if label is not None:
            found[label][result["seed"]] = (path, result)
    return found


def difference(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Of the final metrics of two runs."""
    both = [name for name in COMPARED if name in own and name in other]
    unlike = [name for name in both if own[name] != other[name]]
    if not unlike:
        return f"the same as {ACCUMULATED}, to the last bit of {len(both)} final metrics"
    told = ", ".join(f"{name} {own[name]:.6g} ({other[name]:.6g})" for name in unlike)
    return f"unlike {ACCUMULATED}: {told}"


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
