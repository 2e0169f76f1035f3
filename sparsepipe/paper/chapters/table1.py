"""The paper's Table I: its GPUs, next to what was measured on available devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Printed
from sparsepipe.report.measurements import mean_of, unlike_notes
from sparsepipe.report.tables import tables_of
from sparsepipe.runs.ledger_table import Row

FLOPS = Column(
    key="tflops", heading="float32", unit="TFLOP/s", form="{:.3g}", compare=Compare.RATIO
)
MEMORY = Column(key="memory", heading="memory", unit="GB", form="{:.3g}")
BANDWIDTH = Column(
    key="bandwidth", heading="memory bandwidth", unit="GB/s", form="{:.3g}", compare=Compare.RATIO
)
_COUNTS = ("task.repeats", "task.warmups", "threads_per_rank", "torch")
"""Keys whose values averaged runs should share, in addition to those of their block."""


def _table1_blocks(rows: Sequence[Row]) -> list[Block]:
    runs = [row for row in rows if row["task_name"] == "table1" and row.get("measured_device")]
    tables = tables_of(
        runs,
        lambda row: {
            "scale": row.get("scale"),
            "size": row.get("task.matrix_size"),
            "copied": row.get("task.copy_bytes"),
        },
    )
    blocks = []
    for key, measured in sorted(tables, key=lambda table: [*map(str, table[0].values())]):
        parts = [
            f"scale {key['scale']}" if key["scale"] else "",
            f"matrices of {key['size']:,} by {key['size']:,}" if key["size"] else "",
            f"copies of {key['copied'] / 1e6:,.0f} MB" if key["copied"] else "",
        ]
        title = "; ".join(part for part in parts if part)
        blocks.append(_table1_block(measured, title))
    return blocks or [_table1_block([], "")]


def _table1_block(rows: Sequence[Row], title: str) -> Block:
    measured: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        where, threads = "measured here", row.get("threads_per_rank")
        if threads is not None and row.get("hardware_accelerator") == "cpu":
            where += f", {threads} thread{'s' if threads > 1 else ''}"
        measured.setdefault((str(row["measured_device"]), where), []).append(row)
    cells: list[Cell] = []
    averaged = []
    for paper in printed("table1"):
        label = (paper["gpu"], f"server {paper['server']}, {paper['count']} of them")
        own = [each for each in measured if each[0].casefold().endswith(paper["gpu"].casefold())]
        runs = [run for each in own for run in measured.pop(each)]
        cells += _table1_cells(label, paper, runs)
        averaged.append((label, runs))
    if not rows:
        measured["this machine", "measured here"] = []
    for label, runs in measured.items():
        cells += _table1_cells(label, None, runs)
        averaged.append((label, runs))
    notes = [
        f"{', '.join(label)}: {note}"
        for label, runs in averaged
        for note in unlike_notes(runs, lambda key: key in _COUNTS)
    ]
    return Block(title=title, cells=tuple(cells), notes=tuple(notes))


def _table1_cells(
    label: tuple[str, str], paper: Mapping[str, str] | None, runs: Sequence[Row]
) -> list[Cell]:
    found = (
        (FLOPS, "single_precision_tflops", "flops_per_s", 1e-12),
        (MEMORY, "memory_gb", "memory_bytes", 1e-9),
        (BANDWIDTH, "memory_bandwidth_gb_per_s", "copied_bytes_per_s", 1e-9),
    )
    return [
        Cell(
            row=label,
            column=column,
            paper=None if paper is None else Printed(text=paper[name]),
            ours=mean_of(runs, key, scale=scale),
            expected=paper is None,  # the paper's GPUs may not be available
        )
        for column, name, key, scale in found
    ]


TABLE1 = Chapter(
    name="table1",
    title="Table I: the paper's GPUs and the devices at hand",
    about=(
        "The paper's figures are those of data sheets. Ours are medians, measured with a product "
        "of float32 matrices and a copy of memory, whose bytes count as read and as written: they "
        "are below what a data sheet promises."
    ),
    heads=("device", "where"),
    find=_table1_blocks,
    citation=CITATION,
    pictured=(FLOPS.key, BANDWIDTH.key),
)
