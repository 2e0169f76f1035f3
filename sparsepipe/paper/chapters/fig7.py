"""The paper's Fig. 7: in which layers computing, activations and parameters lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.trainings import data_text, threads_text
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.plots import style
from sparsepipe.plots.shares import LayerShares, accumulated_shares_figure
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.dot_plot import wrapped
from sparsepipe.report.tables import SweepCommand, overrides_beside
from sparsepipe.runs.ledger_table import Row

_LAYERS = 52
"""Layers of the paper's VGG16; rows end at its poolings."""
_COLUMNS = {
    "layers_compute_s": ("compute", "compute time"),
    "layers_activation_bytes": ("activation", "activation size"),
    "layers_parameter_bytes": ("parameter", "parameter size"),
}
"""Names by the keys of a profile's result with a value for each layer."""
_IN_TITLE = (
    *("data", "data.batch_size", "data.num_points", "data.resolution", "model", "model.width"),
)
"""Settings that the title of a block has in words."""
_PAPER = printed("fig7")
_DERIVED = "not printed: computed from the authors' own measurements on a TITAN Xp"
_TITAN = "TITAN Xp, the authors'"


def _fig7_blocks(rows: Sequence[Row], sweep: SweepCommand) -> list[Block]:
    """A block for each profile of the paper's network."""
    runs = [
        row
        for row in rows
        if row["task_name"] == "profile"
        and all(len(row.get(key) or ()) == _LAYERS for key in _COLUMNS)
    ]
    titles = [_title(run) for run in runs]
    blocks = []
    for run, title in zip(runs, titles, strict=True):
        own = title if titles.count(title) == 1 else f"{title}; run {run.get('run_id')}"
        cells = tuple(cell for paper in _PAPER for cell in _fig7_cells(paper, run))
        blocks.append(Block(title=own, cells=cells, sweep=sweep.like([run], ())))
    without = tuple(cell for paper in _PAPER for cell in _fig7_cells(paper, None))
    return blocks or [Block(cells=without, sweep=sweep.text())]


def _title(run: Row) -> str:
    is_one_cpu = run.get("ranks") == 1 and run.get("hardware_accelerator") == "cpu"
    parts = [
        f"scale {run['scale']}" if run.get("scale") else "",
        str(run.get("model._target_", "")).rpartition(".")[2],
        f"width {run['model.width']:g}" if "model.width" in run else "",
        data_text(run),
        f"{run.get('data.resolution')}³, batches of {run.get('data.batch_size')}",
        str(run.get("hardware_devices", "")),
        threads_text(run.get("threads_per_rank")) if is_one_cpu else "",
        *overrides_beside(run, _IN_TITLE),
    ]
    return "; ".join(part for part in parts if part)


def _fig7_cells(paper: Mapping[str, str], run: Row | None) -> Iterator[Cell]:
    last = int(paper["last_layer"])
    for key, (name, heading) in _COLUMNS.items():
        column = Column(
            key=f"{name}_share", heading=heading, unit="%", form="{:.1f}",
            compare=Compare.DIFFERENCE,
        )  # fmt: skip
        text = f"{float(paper[f'{name}_percent']):.1f}"
        yield Cell(
            row=(f"0 to {last}",),
            column=column,
            paper=Printed(text=text, derived=_DERIVED),
            ours=None if run is None else _share(run, key, last),
        )


def _share(run: Row, key: str, last: int) -> Ours:
    values = [float(value) for value in run[key]]
    return Ours(value=100 * sum(values[: last + 1]) / (sum(values) or 1.0), runs=(run,))


def _draw_fig7(block: Block) -> Figure | None:
    """Our curves, and the authors' at the ends of rows."""
    if not block.runs:
        return None
    (run,) = block.runs
    costs = LayerShares(
        compute_s=run["layers_compute_s"],
        activation_bytes=run["layers_activation_bytes"],
        parameter_bytes=run["layers_parameter_bytes"],
    )
    figure = accumulated_shares_figure({block.title: costs})
    axes = figure.axes[0]
    axes.set_title(wrapped(block.title, 50), fontsize=style.TICK_PT, color=style.INK)
    places = [int(paper["last_layer"]) for paper in _PAPER]
    look: dict[str, Any] = {
        "linestyle": "none",
        "markeredgecolor": style.INK,
        "markerfacecolor": "white",
    }
    for (name, heading), marker in zip(_COLUMNS.values(), ("o", "s", "^"), strict=True):
        shares = [float(paper[f"{name}_percent"]) for paper in _PAPER]
        label = f"{heading}, {_TITAN}"
        axes.plot(places, shares, marker=marker, zorder=4, clip_on=False, label=label, **look)
    figure.legends[0].remove()
    figure.legend(fontsize=style.TICK_PT, frameon=False, loc="outside lower center", ncols=2)
    return figure


FIG7 = Chapter(
    name="fig7",
    title="Fig. 7: where computing, activations and parameters lie",
    about=(
        "Shares of VGG16's compute time (forward and backward), activation size and parameter "
        "size in its first layers. The paper draws them for a TITAN Xp and prints no figures: "
        "most computing lies in early layers with large activations, most parameters in late "
        "ones. Its column here is computed from the measurements in its authors' repository. "
        "Rows end at the poolings."
    ),
    heads=("layers",),
    find=_fig7_blocks,
    citation=CITATION,
    draw=_draw_fig7,
)
