"""The paper's Table I: its GPUs, beside what was measured on devices at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Printed, Row
from sparsepipe.report.commands import Commands, missing_commands
from sparsepipe.report.measurements import mean_of, unlike_notes

FLOPS = Column(
    key="tflops", heading="float32", unit="TFLOP/s", form="{:.3g}", compare=Compare.RATIO
)
MEMORY = Column(key="memory", heading="memory", unit="GB", form="{:.3g}")
BANDWIDTH = Column(
    key="bandwidth", heading="memory bandwidth", unit="GB/s", form="{:.3g}", compare=Compare.RATIO
)

_PAPER = printed("table1")


_EFFORT = ("task.matrix_size", "task.copy_bytes")
_COUNTS = ("task.repeats", "task.warmups", "threads_per_rank", "torch")
"""Keys that runs which are averaged are to have in common, beside those of their block."""


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("task_name") == "table1" and row.get("measured_device"):
            found.setdefault((row.get("scale"), *map(row.get, _EFFORT)), []).append(row)
    keys = sorted(found, key=lambda key: [str(part) for part in key])
    made_by = {key: _commands(key, commands) for key in keys}
    missing = missing_commands(commands, made_by.values())
    return [
        *(_block(found[key], theirs, title=_title(*key)) for key, theirs in made_by.items()),
        *(_block([], theirs, title=title) for title, theirs in missing.items()),
    ]


def _title(scale: str | None, size: int | None, copied: int | None) -> str:
    """The method of measurement, as text."""
    parts = [
        f"scale {scale}" if scale else "",
        f"matrices of {size:,} by {size:,}" if size else "",
        f"copies of {copied / 1e6:,.0f} MB" if copied else "",
    ]
    return "; ".join(part for part in parts if part)


def _commands(key: Sequence[Any], commands: Commands) -> Commands:
    scale = (f"scale={key[0]}",) if key[0] else ()
    known = {name: value for name, value in zip(_EFFORT, key[1:], strict=True) if value}
    return commands.giving(*scale, *commands.unlike(scale, known))


def _block(rows: Sequence[Row], commands: Commands, *, title: str) -> Block:
    measured: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        measured.setdefault((str(row["measured_device"]), _where(row)), []).append(row)
    of_paper = [
        (
            (paper["gpu"], f"server {paper['server']}, {paper['count']} of them"),
            paper,
            [run for (name, _), runs in measured.items() if _is(name, paper) for run in runs],
        )
        for paper in _PAPER
    ]
    others = [
        (label, runs)
        for label, runs in measured.items()
        if not any(_is(label[0], paper) for paper in _PAPER)
    ]
    if not measured:
        others = [(("this machine", "measured here"), [])]
    cells = [cell for label, paper, runs in of_paper for cell in _cells(label, paper, runs)]
    for label, runs in others:
        cells += _cells(label, None, runs, commands.one())
    averaged = [*((label, runs) for label, _, runs in of_paper), *others]
    notes = [
        f"{', '.join(label)}: {note}"
        for label, runs in averaged
        for note in unlike_notes(runs, lambda key: key in _COUNTS)
    ]
    return Block(title=title, cells=tuple(cells), notes=tuple(notes))


def _where(row: Row) -> str:
    """The device, and for a processor the number of threads."""
    threads = row.get("threads_per_rank")
    is_cpu = row.get("hardware_accelerator") == "cpu"
    if threads is None or not is_cpu:
        return "measured here"
    return f"measured here, {threads} thread{'s' if threads > 1 else ''}"


def _is(name: str, paper: Mapping[str, str]) -> bool:
    """Whether a device is the paper's GPU, with any vendor prefix."""
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
            ours=mean_of(runs, key, scale=scale),
            command=made_by,  # none: a GPU of the paper is measured where it is
        )
        for column, name, key, scale in found
    ]


TABLE1 = Chapter(
    name="table1",
    title="Table I: the paper's GPUs and the devices at hand",
    about=(
        "The paper's figures are those of data sheets. Ours are what a product of float32 "
        "matrices and a copy of memory reach, medians, each byte counted as read and as written: "
        "less than a data sheet promises."
    ),
    heads=("device", "where"),
    find=_blocks,
    citation=CITATION,
    pictured=(FLOPS.key, BANDWIDTH.key),
)
