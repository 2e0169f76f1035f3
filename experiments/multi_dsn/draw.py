"""Curves of validation accuracy on each target, of the source alone and of DSN, from files of runs.

    python experiments/multi_dsn/draw.py

Runs are looked for in outputs/multi_dsn ($SPARSEPIPE_OUTPUTS/multi_dsn); curves_digits.png and
curves_shapes.png are written beside this file. Lines are means over seeds, bands reach from the
least to the largest.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from sparsepipe.plots import style
from sparsepipe.plots.curves import curve
from sparsepipe.runs.metrics import read_metrics

HERE = Path(__file__).parent
OUTPUTS = Path(os.environ.get("SPARSEPIPE_OUTPUTS", HERE.parents[1] / "outputs"))
NETWORKS = {"digit_domains": "curves_digits.png", "shape_domains": "curves_shapes.png"}
LOOKS = {"source_only": ("source only", style.INK, "--"), "dsn": ("DSN", style.BLUE, "-")}

KEYS = {"experiment", "seed", "data.source"}
KEYS |= {f"paper{key}" for key in (".extent", ".training", "/network")} | {"paths.outputs"}

Rows = list[Any]


def finished() -> dict[str, dict[str, list[Rows]]]:
    """Metrics of finished runs by network and way of training."""
    found: dict[str, dict[str, list[Rows]]] = defaultdict(lambda: defaultdict(list))
    for done in sorted((OUTPUTS / "multi_dsn").glob("*/DONE.json")):
        result = json.loads((done.parent / "result.json").read_text(encoding="utf-8"))
        # Of another extent, or with further overrides, are runs by which settings were chosen.
        given = {word.lstrip("+").partition("=")[0] for word in result["hydra.overrides"]}
        if "paper.extent=desk" in result["hydra.overrides"] and given <= KEYS:
            rows = list(read_metrics(done.parent / "metrics.csv"))
            found[result["study.cell.network"]][result["study.cell.training"]].append(rows)
    return found


def draw(methods: dict[str, list[Rows]], file: Path) -> None:
    """A panel for the mean of the targets and one for each."""
    keys = {key for row in methods["dsn"][0] for key in row}
    names = sorted(key.split("/")[1] for key in keys if _is_domain(key))
    panels = ["val/target_accuracy", *(f"val/{name}/accuracy" for name in names)]
    figure = style.new_figure(width_in=10.4, height_in=0.6 + 2.4 * -(-len(panels) // 4))
    every = figure.subplots(-(-len(panels) // 4), 4, sharex=True, sharey=True).flatten()
    for axes, key in zip(every, panels, strict=False):
        style.tidy(axes)
        for method, (label, colour, line) in LOOKS.items():
            found = curve(methods[method], key)
            low, high = ([100 * each for each in edge] for edge in (found.least, found.largest))
            axes.fill_between(found.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
            mean = [100 * each for each in found.mean]
            axes.plot(
                found.epochs, mean, color=colour, linestyle=line,
                label=f"{label} ({len(methods[method])} seeds)",
            )  # fmt: skip
        title = "mean of the targets" if key == panels[0] else key.split("/")[1]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, fontsize=style.LABEL_PT, color=style.INK)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    every[0].legend(fontsize=style.TICK_PT, frameon=False)
    figure.supxlabel("epoch", fontsize=style.LABEL_PT, color=style.INK)
    figure.supylabel("validation accuracy (%)", fontsize=style.LABEL_PT, color=style.INK)
    style.save_png(figure, file)


def _is_domain(key: str) -> bool:
    return key.startswith("val/") and key.endswith("/accuracy") and key.count("/") == 2


def main() -> None:
    for network, methods in finished().items():
        if all(methods[method] for method in LOOKS):
            draw(methods, HERE / NETWORKS[network])


if __name__ == "__main__":
    main()
