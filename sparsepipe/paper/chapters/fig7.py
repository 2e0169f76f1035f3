"""The paper's Fig. 7: how compute time, activations and parameters are spread over the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsepipe.paper.chapters.trainings import data_text, source_of, threads_text
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.tables import overrides_beside
from sparsepipe.runs.ledger_table import Row

_LAYERS = 52
"""Number of layers of the paper's VGG16; each row of the table ends with a pooling layer."""
_COLUMNS = {
    key: Column(
        key=f"{name}_share", heading=heading, unit="%", form="{:.1f}", compare=Compare.DIFFERENCE
    )
    for key, name, heading in (
        ("layers_compute_s", "compute", "compute time"),
        ("layers_activation_bytes", "activation", "activation size"),
        ("layers_parameter_bytes", "parameter", "parameter size"),
    )
}
"""Columns by key of a profile run's result, which has a value for each layer under it."""
_IN_TITLE = (
    *("data", "data.batch_size", "data.num_points", "data.resolution", "model", "model.width"),
)
"""Settings that the title of a block contains."""
_PAPER = printed("fig7")
_DERIVED = "not printed: computed from the authors' own measurements on a TITAN Xp"


def _fig7_blocks(rows: Sequence[Row]) -> list[Block]:
    """A block for each profile of the paper's network, or one without values if there is none."""
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
        blocks.append(Block(title=own, cells=tuple(_fig7_cells(run))))
    return blocks or [Block(cells=tuple(_fig7_cells(None)))]


def _title(run: Row) -> str:
    is_one_cpu = run.get("ranks") == 1 and run.get("hardware_accelerator") == "cpu"
    parts = [
        f"scale {run['scale']}" if run.get("scale") else "",
        str(run.get("model._target_", "")).rpartition(".")[2],
        f"width {run['model.width']:g}" if "model.width" in run else "",
        data_text(source_of(run), run.get("data.num_points")),
        f"{run.get('data.resolution')}³, batches of {run.get('data.batch_size')}",
        str(run.get("hardware_devices", "")),
        threads_text(run.get("threads_per_rank")) if is_one_cpu else "",
        *overrides_beside(run, _IN_TITLE),
    ]
    return "; ".join(part for part in parts if part)


def _fig7_cells(run: Row | None) -> Iterator[Cell]:
    for paper in _PAPER:
        last = int(paper["last_layer"])
        for key, column in _COLUMNS.items():
            ours = None
            if run is not None:
                values = [float(value) for value in run[key]]
                share = 100 * sum(values[: last + 1]) / (sum(values) or 1.0)
                ours = Ours(value=share, runs=(run,))
            text = f"{float(paper[column.key.replace('share', 'percent')]):.1f}"
            printed_ = Printed(text=text, derived=_DERIVED)
            yield Cell(row=(f"0 to {last}",), column=column, paper=printed_, ours=ours)


FIG7 = Chapter(
    name="fig7",
    title="Fig. 7: where computing, activations and parameters lie",
    about=(
        "Shares of VGG16's compute time (forward and backward), activation size and parameter "
        "size in its first layers. The paper draws them for a TITAN Xp but prints no numbers: "
        "most computing lies in early layers with large activations, most parameters in late "
        "ones. Its column here is computed from the measurements in its authors' repository. "
        "Rows end at the poolings."
    ),
    heads=("layers",),
    find=_fig7_blocks,
    citation=CITATION,
    pictured=tuple(column.key for column in _COLUMNS.values()),
)
