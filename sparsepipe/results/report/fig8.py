"""The paper's Fig. 8: accuracy, inference rate and memory over the resolution of the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparsepipe.results.paper import printed
from sparsepipe.results.report.cell import Cell, Column, Ours, Printed, Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Block, Exhibit
from sparsepipe.results.report.grouping import blocks_of
from sparsepipe.results.report.over_resolution import over_resolution
from sparsepipe.results.report.rows import mean_of
from sparsepipe.results.report.setting_commands import data_notes
from sparsepipe.results.report.settings import Setting
from sparsepipe.results.report.trainings import TEST, TRAIN, Asked, accuracy, run_notes

RATE = Column(
    key="inference_rate", heading="inference", unit="shapes/s", form="{:.1f}", printed=False
)
MEMORY = Column(
    key="memory", heading="memory of a training step", unit="MB", form="{:,.0f}", printed=False
)

_ROWS = tuple(
    Asked(resolution=resolution, network=network)
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


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    return blocks_of(rows, commands, cell_of=_cell_of, make=_block)


def _cell_of(row: Row) -> tuple[str, ...] | None:
    asked = next((each for each in _ROWS if each.has(row)), None)
    return None if asked is None or row.get("task_name") != _TASK else asked.overrides


def _block(rows: Sequence[Row], commands: Commands, setting: Setting | None) -> Block:
    return Block(
        title="" if setting is None else setting.title,
        cells=tuple(cell for asked in _ROWS for cell in _cells(asked, rows, commands)),
        notes=(
            *data_notes(commands),
            *(note for asked in _ROWS for note in run_notes(asked, asked.runs(rows, task=_TASK))),
        ),
        sweep=commands.sweep(),
    )


def _cells(asked: Asked, rows: Sequence[Row], commands: Commands) -> list[Cell]:
    runs = asked.runs(rows, task=_TASK)
    paper = _PAPER.get((str(asked.resolution), asked.network), {})
    found = (
        (TRAIN, paper.get("train_accuracy_percent"), accuracy(runs, "train")),
        (TEST, paper.get("test_accuracy_percent"), accuracy(runs, "test")),
        (RATE, None, mean_of(runs, "inference_shapes_per_s")),
        (MEMORY, None, mean_of(runs, "step_memory_bytes", scale=1e-6)),
    )
    refused = _refused(runs)
    return [
        Cell(
            row=(f"{asked.resolution}³", asked.network),
            column=column,
            paper=None if text is None else Printed(text=text, derived=_FROM_TABLE),
            ours=_beside(ours, refused, column),
            command=commands.one(*asked.overrides),
        )
        for column, text, ours in found
    ]


def _refused(runs: Sequence[Row]) -> Ours | None:
    """What is to be said of a network that did not fit; None where none was refused."""
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
    """A figure, with what is to be said of seeds that did not fit; or that in place of one."""
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


FIG8 = Exhibit(
    name="fig8",
    title="Fig. 8: accuracy, inference rate and memory over the resolution",
    about=(
        "VGG16, dense and sparse, on one device, on grids of 32³ to 200³; dense until a training "
        "step no longer fits into memory. The paper draws accuracies and prints no figures with "
        "them: those at 32³ and 50³ are of its Table II, for 100³ and 200³ there are none. It "
        "says that the dense network could not be held in memory at 100³ and 200³."
    ),
    heads=("grid", "network"),
    find=_blocks,
    draw=lambda block: over_resolution(block, (TRAIN, TEST, RATE, MEMORY)),
)
