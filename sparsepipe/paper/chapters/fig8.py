"""The paper's Fig. 8: accuracy, inference rate and memory over the resolution of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sparsepipe.paper.chapters.trainings import TEST, TRAIN, blocks_of
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours, Printed
from sparsepipe.report.measurements import mean_of, unlike_notes, words
from sparsepipe.report.tables import cell_of, of_training
from sparsepipe.runs.ledger_table import Row

RATE = Column(
    key="inference_rate", heading="inference", unit="shapes/s", form="{:.1f}", printed=False
)
MEMORY = Column(
    key="memory", heading="memory of a training step", unit="MB", form="{:,.0f}", printed=False
)
_FROM_TABLE = "not printed with Fig. 8: of Table II"
_OF_CELLS = ("paper/network", "data.resolution")
_ROWS = tuple((grid, network) for grid in (32, 50, 100, 200) for network in ("dense", "sparse"))
_PAPER: Mapping[tuple[int, str], Mapping[str, str]] = {
    (int(row["resolution"]), row["network"]): row
    for row in printed("table2")
    if row["num_gpus"] == "1" and row["point_ratio_p"] == "1"
}


def _fig8_blocks(rows: Sequence[Row]) -> list[Block]:
    trainings = [
        row
        for row in rows
        if row["task_name"] == "train_if_fits" and row.get("study.cell.point_ratio", 1) == 1
    ]
    return blocks_of(trainings, of_cells=_OF_CELLS, make=_fig8_block)


def _fig8_block(rows: Sequence[Row]) -> Block:
    cells: list[Cell] = []
    notes: list[str] = []
    for grid, network in _ROWS:
        place = (grid, network)
        runs = [row for row in rows if cell_of(row, "resolution", "network") == place]
        cells += _fig8_cells(place, runs)
        notes += [f"{network} at {grid}³: {note}" for note in unlike_notes(runs, of_training)]
    return Block(cells=tuple(cells), notes=tuple(notes))


def _fig8_cells(place: tuple[int, str], runs: Sequence[Row]) -> Iterator[Cell]:
    paper = _PAPER.get(place, {})
    refused = _refused([run for run in runs if run.get("fits") is False])
    for column, text, ours in (
        (TRAIN, paper.get("train_accuracy_percent"), mean_of(runs, "train/accuracy", scale=100)),
        (TEST, paper.get("test_accuracy_percent"), mean_of(runs, "test/accuracy", scale=100)),
        (RATE, None, mean_of(runs, "inference_shapes_per_s")),
        (MEMORY, None, mean_of(runs, "step_memory_bytes", scale=1e-6)),
    ):
        shown = ours or refused
        if refused is not None and ours is not None:
            names = ", ".join(str(run.get("run_id")) for run in refused.runs)
            shown = replace(ours, note=f"without {names}: {refused.note}")
        elif refused is not None and column is MEMORY:
            run = refused.runs[0]
            if run.get("budget_bytes") and run.get("limited_by") == "over_budget":
                shown = replace(refused, value=f"over {run['budget_bytes'] / 1e6:,.0f}")
        yield Cell(
            row=(f"{place[0]}³", place[1]),
            column=column,
            paper=Printed(text=text, derived=_FROM_TABLE) if text else None,
            ours=shown,
        )


def _refused(runs: Sequence[Row]) -> Ours | None:
    """Words for a network that did not fit; None where all fitted."""
    if not runs:
        return None
    first = runs[0]
    why = str(first.get("limited_by") or "over_budget").replace("_", " ")
    budget = first.get("budget_bytes")
    limit = f", the budget is {budget / 1e6:,.0f} MB" if budget else ""
    step = f"a training step of {first.get('data.batch_size')} shapes"
    return words("does not fit", runs, f"{step} does not fit: {why}{limit}")


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
    find=_fig8_blocks,
    citation=CITATION,
    pictured=(TRAIN.key, TEST.key, RATE.key, MEMORY.key),
)
