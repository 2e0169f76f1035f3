"""The paper's Fig. 8: accuracy, inference rate and memory over the resolution of the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsepipe.paper.chapters.training_settings import Setting, blocks_of, data_notes
from sparsepipe.paper.chapters.trainings import TEST, TRAIN, TrainingRow, accuracy, run_notes
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.plots import style
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours, Printed, Row, our_number
from sparsepipe.report.commands import Commands
from sparsepipe.report.dot_plot import wrapped
from sparsepipe.report.measurements import mean_of

_LOOKS: Mapping[str, Mapping[str, Any]] = {
    # Line, marker and filling distinguish them without colour.
    "dense": {
        "color": style.VERMILION, "linestyle": "--", "marker": "s", "markerfacecolor": "white",
        "markeredgewidth": 1.6,
    },
    "sparse": {"color": style.BLUE, "linestyle": "-", "marker": "o"},
}  # fmt: skip
_PAPER_LOOKS: Mapping[str, Mapping[str, Any]] = {
    network: {
        "marker": "D", "markersize": 8, "linestyle": "none", "markeredgecolor": style.INK,
        "markerfacecolor": face,
    }
    for network, face in (("dense", "white"), ("sparse", style.INK))
}  # fmt: skip


def over_resolution(block: Block, columns: Sequence[Column]) -> Figure | None:
    """A panel for each column that has figures of ours; None where none has."""
    keys = {column.key for column in columns}
    drawn = {cell.column for cell in block.cells if our_number(cell) is not None}
    shown = [column for column in block.columns if column.key in keys and column in drawn]
    if not shown:
        return None
    grids = list(dict.fromkeys(grid for grid, _ in block.rows))
    figure = style.new_figure(width_in=3.2 * len(shown), height_in=3.9)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, column in zip(panels, shown, strict=True):
        _draw(axes, column, block, grids)
    figure.suptitle(wrapped(block.title, 34 * len(shown)), fontsize=style.TICK_PT)
    figure.legend(
        handles=_legend(block), fontsize=style.TICK_PT, frameon=False,
        loc="outside lower center", ncols=4,
    )  # fmt: skip
    return figure


def _draw(axes: Axes, column: Column, block: Block, grids: Sequence[str]) -> None:
    style.tidy(axes)
    words: list[str] = []
    for network, look in _LOOKS.items():
        cells = [block.rows.get((grid, network), {}).get(column) for grid in grids]
        found = [(place, our_number(cell)) for place, cell in enumerate(cells)]
        ours = [(place, value) for place, value in found if value is not None]
        axes.plot([place for place, _ in ours], [value for _, value in ours], zorder=3, **look)
        for place, cell in enumerate(cells):
            if cell is not None and cell.paper is not None and cell.paper.value is not None:
                axes.plot([place], [cell.paper.value], zorder=2, **_PAPER_LOOKS[network])
        words += _words(network, dict(zip(grids, cells, strict=True)))
    axes.set_xticks(range(len(grids)), grids)
    axes.set_xlim(-0.4, len(grids) - 0.6)
    axes.margins(y=0.15)
    style.from_zero(axes, "y")
    axes.set_xlabel("\n".join(["grid", *words]), fontsize=style.LABEL_PT, color=style.INK)
    axes.set_ylabel(column.title, fontsize=style.LABEL_PT, color=style.INK)


def _words(network: str, cells: Mapping[str, Cell | None]) -> list[str]:
    """Words in place of figures of a network, with the grids that they apply to."""
    found: dict[str, list[str]] = {}
    for grid, cell in cells.items():
        if cell is not None and cell.ours is not None and isinstance(cell.ours.value, str):
            found.setdefault(cell.ours.value, []).append(grid)
    return [f"{network} {words}: {', '.join(grids)}" for words, grids in found.items()]


def _legend(block: Block) -> list[Line2D]:
    handles = [Line2D([], [], label=f"{name}, ours", **look) for name, look in _LOOKS.items()]
    if any(cell.paper is not None for cell in block.cells):
        handles += [
            Line2D([], [], label=f"{name}, the paper's", **look)
            for name, look in _PAPER_LOOKS.items()
        ]
    return handles


RATE = Column(
    key="inference_rate", heading="inference", unit="shapes/s", form="{:.1f}", printed=False
)
MEMORY = Column(
    key="memory", heading="memory of a training step", unit="MB", form="{:,.0f}", printed=False
)

_ROWS = tuple(
    TrainingRow(resolution=resolution, network=network)
    for resolution in (32, 50, 100, 200)
    for network in ("dense", "sparse")
)
_TASK = "train_if_fits"
_PAPER: Mapping[tuple[str, str], Mapping[str, str]] = {
    (row["resolution"], row["network"]): row
    for row in printed("table2")
    if row["num_gpus"] == "1" and row["point_ratio_p"] == "1"
}
_FROM_TABLE = "not printed with Fig. 8: of Table II"


def _cell_of(row: Row) -> tuple[str, ...] | None:
    entry = next((each for each in _ROWS if each.has(row)), None)
    return None if entry is None or row.get("task_name") != _TASK else entry.overrides


def _block(rows: Sequence[Row], commands: Commands, setting: Setting | None) -> Block:
    return Block(
        title="" if setting is None else setting.title,
        cells=tuple(cell for entry in _ROWS for cell in _cells(entry, rows, commands)),
        notes=(
            *data_notes(commands),
            *(note for entry in _ROWS for note in run_notes(entry, entry.runs(rows, task=_TASK))),
        ),
        sweep=commands.sweep(),
    )


def _cells(entry: TrainingRow, rows: Sequence[Row], commands: Commands) -> list[Cell]:
    runs = entry.runs(rows, task=_TASK)
    paper = _PAPER.get((str(entry.resolution), entry.network), {})
    found = (
        (TRAIN, paper.get("train_accuracy_percent"), accuracy(runs, "train")),
        (TEST, paper.get("test_accuracy_percent"), accuracy(runs, "test")),
        (RATE, None, mean_of(runs, "inference_shapes_per_s")),
        (MEMORY, None, mean_of(runs, "step_memory_bytes", scale=1e-6)),
    )
    refused = _refused(runs)
    return [
        Cell(
            row=(f"{entry.resolution}³", entry.network),
            column=column,
            paper=None if text is None else Printed(text=text, derived=_FROM_TABLE),
            ours=_beside(ours, refused, column),
            command=commands.one(*entry.overrides),
        )
        for column, text, ours in found
    ]


def _refused(runs: Sequence[Row]) -> Ours | None:
    """Words for a network that did not fit; None where all fitted."""
    refused = [run for run in runs if run.get("fits") is False]
    if not refused:
        return None
    why = str(refused[0].get("limited_by") or "over_budget").replace("_", " ")
    batch, budget = refused[0].get("data.batch_size"), refused[0].get("budget_bytes")
    limit = f", the budget is {float(budget) / 1e6:,.0f} MB" if budget else ""
    return Ours(
        value="does not fit",
        runs=tuple(refused),
        note=f"a training step of {batch} shapes does not fit: {why}{limit}",
        counts=False,
    )


def _beside(ours: Ours | None, refused: Ours | None, column: Column) -> Ours | None:
    """A figure with a note on seeds that did not fit; or words in place of a figure."""
    if refused is None:
        return ours
    if ours is None:
        return _in_words(refused, column)
    names = ", ".join(str(run.get("run_id")) for run in refused.runs)
    return replace(ours, note=f"without {names}: {refused.note}")


def _in_words(refused: Ours, column: Column) -> Ours:
    budget = refused.runs[0].get("budget_bytes")
    if column is MEMORY and budget and refused.runs[0].get("limited_by") == "over_budget":
        return replace(refused, value=f"over {float(budget) / 1e6:,.0f}")
    return refused


FIG8 = Chapter(
    name="fig8",
    title="Fig. 8: accuracy, inference rate and memory over the resolution",
    about=(
        "VGG16, dense and sparse, on one device, on grids of 32³ to 200³; dense until a training "
        "step no longer fits into memory. The paper draws accuracies and prints no figures with "
        "them: those at 32³ and 50³ are of its Table II, for 100³ and 200³ there are none. It "
        "says that the dense network could not be held in memory at 100³ and 200³."
    ),
    heads=("grid", "network"),
    find=partial(blocks_of, cell_of=_cell_of, make=_block),
    citation=CITATION,
    draw=lambda block: over_resolution(block, (TRAIN, TEST, RATE, MEMORY)),
)
