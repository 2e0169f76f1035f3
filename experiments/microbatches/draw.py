"""Table and figure of the study of microbatches, from the runs' own files.

    python experiments/microbatches/draw.py

Runs are looked for in outputs/microbatches, or below what SPARSEPIPE_OUTPUTS names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean

from sparsepipe.results.comparison import compare

HERE = Path(__file__).parent
OUTPUTS = Path(os.environ.get("SPARSEPIPE_OUTPUTS", HERE.parents[1] / "outputs"))
WAYS = {
    "single": "one device, whole minibatches",
    "gpipe": "GPipe, 4 microbatches",
    "sync_1f1b": "1F1B, 4 microbatches",
}


def main() -> None:
    found: dict[str, list[Path]] = {label: [] for label in WAYS.values()}
    for done in sorted((OUTPUTS / "microbatches").glob("*/DONE.json")):
        result = json.loads((done.parent / "result.json").read_text(encoding="utf-8"))
        found[WAYS[result["strategy"]]].append(done.parent)
    for label, runs in found.items():
        results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in runs]
        for name in ("train/accuracy", "val/accuracy", "test/accuracy"):
            values = [100 * result[name] for result in results if name in result]
            if values:
                spread = f"{fmean(values):.2f} % [{min(values):.2f} .. {max(values):.2f}]"
                sys.stdout.write(f"{label:32}{name:18}{len(values)} runs  {spread}\n")
    compare(
        {label: [run / "metrics.csv" for run in runs] for label, runs in found.items() if runs},
        HERE / "curves.png",
    )


if __name__ == "__main__":
    main()
