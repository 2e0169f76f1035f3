"""The paper's Table I: its GPUs, beside what was measured on devices at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsepipe.results.paper import printed
from sparsepipe.results.report.cell import Cell, Column, Compare, Ours, Printed, Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Block, Exhibit
from sparsepipe.results.report.rows import mean_of

FLOPS = Column(
    key="tflops", heading="float32", unit="TFLOP/s", form="{:.3g}", compare=Compare.RATIO
)
MEMORY = Column(key="memory", heading="memory", unit="GB", form="{:.3g}")
BANDWIDTH = Column(
    key="bandwidth", heading="memory bandwidth", unit="GB/s", form="{:.3g}", compare=Compare.RATIO
)

_PAPER = printed("table1")


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    measured: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("task_name") == "table1" and row.get("measured_device"):
            measured.setdefault(str(row["measured_device"]), []).append(row)
    cells = [cell for paper in _PAPER for cell in _paper_cells(paper, measured)]
    others = [name for name in measured if not any(_is(name, paper) for paper in _PAPER)]
    for name in others:
        cells += _cells((name, "measured here"), None, measured[name], commands.one())
    if not measured:
        cells += _cells(("device at hand", "measured here"), None, [], commands.one())
    return [Block(cells=tuple(cells))]


def _paper_cells(paper: Mapping[str, str], measured: Mapping[str, list[Row]]) -> list[Cell]:
    runs = [run for name, theirs in measured.items() if _is(name, paper) for run in theirs]
    where = f"server {paper['server']}, {paper['count']} of them"
    return _cells((paper["gpu"], where), paper, runs)


def _is(name: str, paper: Mapping[str, str]) -> bool:
    """Whether a device is the paper's GPU, whatever stands before its name."""
    return name.casefold().endswith(paper["gpu"].casefold())


def _cells(
    row: tuple[str, str], paper: Mapping[str, str] | None, runs: Sequence[Row], made_by: str = ""
) -> list[Cell]:
    found = (
        (FLOPS, "single_precision_tflops", "flops_per_s", 1e-12),
        (MEMORY, "memory_gb", "memory_bytes", 1e-9),
        (BANDWIDTH, "memory_bandwidth_gb_per_s", "copied_bytes_per_s", 1e-9),
    )
    return [
        Cell(
            row=row,
            column=column,
            paper=None if paper is None else Printed(text=paper[name]),
            ours=_ours(runs, key, scale),
            command=made_by,  # none: a GPU of the paper is measured where it is
        )
        for column, name, key, scale in found
    ]


def _ours(runs: Sequence[Row], key: str, scale: float) -> Ours | None:
    return mean_of(runs, key, scale=scale)


TABLE1 = Exhibit(
    name="table1",
    title="Table I: the paper's GPUs and the devices at hand",
    about=(
        "The paper's figures are those of data sheets. Ours are what a product of float32 "
        "matrices and a copy of memory reach, medians, each byte counted as read and as written: "
        "less than a data sheet promises."
    ),
    heads=("device", "where"),
    find=_blocks,
    pictured=(FLOPS.key, BANDWIDTH.key),
)
