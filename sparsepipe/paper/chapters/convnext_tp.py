"""Figs. 3 and 4 of NVIDIA's and NIO's study: ConvNeXt on images that devices cut along W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.measured_steps import (
    MEMORY,
    Size,
    budget_text,
    largest_cells,
    memory_cells,
    over_sizes,
    sets_apart,
    size_text,
    sizes_of,
    tables_of_steps,
    values_at,
)
from sparsepipe.paper.printed import CITATION_OF_CONVNEXT, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours, Printed
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.report.measurements import (
    crowded,
    mean_of,
    no_speedup,
    ratio_of,
    unlike_notes,
    words,
)
from sparsepipe.runs.ledger_table import Row

STEP = Column(key="step", heading="step", unit="ms", form="{:,.0f}", printed=False)
TIMES = Column(key="times", heading="time over the first", unit="x", form="{:.2f}")
_OF_CELLS = ("parallel.devices", "parallel.grid", "model.checkpointing")
_DEVICES = {1, 2, 4, 8}
_RATIO_OF_TIMES = "a ratio of two printed times; which runs they are of is not known here"

RunsOfDevices = Mapping[int, Sequence[Row]]
"""Runs by their numbers of devices."""


def _convnext_tp_blocks(rows: Sequence[Row]) -> list[Block]:
    """Three blocks of a table: memory and time at each size, largest sizes, and ratios of times."""
    blocks = []
    for title, scale, table in tables_of_steps(
        rows, _OF_CELLS, of_scale={"paper": "model=convnext_xl"}
    ):
        memory: list[Cell] = []
        largest: list[Cell] = []
        notes: list[str] = []
        first, *others = (row["time_ms"] for row in printed("convnext_tp"))
        ratios = [
            Cell(
                row=("-", f"printed: {each} over {first} ms", "-"),
                column=TIMES,
                paper=Printed(text=f"{float(each) / float(first):.2f}", derived=_RATIO_OF_TIMES),
                expected=False,
            )
            for each in others
        ]
        for is_checkpointed, name in ((False, "none"), (True, "all blocks")):
            own = [row for row in table if row["study.cell.checkpointing"] == is_checkpointed]
            counts = sorted(_DEVICES | {row["study.cell.devices"] for row in own})
            runs = {
                count: [row for row in own if row["study.cell.devices"] == count]
                for count in counts
            }
            sizes = sizes_of(own)
            for devices, those in runs.items():
                if scale == "smoke" and not those:  # it sweeps only some
                    continue
                if devices > 1 and not own:
                    row = (name, "of the widest image, and of one that grows", str(devices))
                    ratios.append(Cell(row=row, column=TIMES))
                largest += largest_cells((name, "largest", str(devices)), those, runs[1])
                notes += [
                    f"checkpointing {name} on {devices}: {note}"
                    for note in unlike_notes(those, sets_apart)
                ]
                for size in sizes:
                    row = (name, size_text(size), str(devices))
                    memory += memory_cells(row, size, those, runs[1], ranks=devices)
                    step = _step(those, size)
                    memory.append(Cell(row=row, column=STEP, ours=step, expected=False))
            ratios += _ratios(name, runs, sizes)
        budget = f"{title}; budget: {budget_text(table)}"
        found = (title, memory), (budget, largest), (f"{title}; times as ratios", ratios)
        blocks += [Block(title=title, cells=tuple(cells)) for title, cells in found if cells]
        blocks[-1] = replace(blocks[-1], notes=tuple(notes))
    return blocks


def _step(runs: Sequence[Row], size: Size) -> Ours | None:
    """Time of a step, marked where ranks take turns."""
    found = mean_of(runs, values_at(size, "step_s"), scale=1e3)
    reason = next((why for run in runs if (why := crowded(run))), "")
    if found is None or not reason:
        return found
    return replace(found, note=reason.replace("no speedup", "no scaling"), counts=False)


def _ratios(name: str, runs: RunsOfDevices, sizes: Sequence[Size]) -> Iterator[Cell]:
    for devices, those in runs.items():
        if not sizes or devices == 1 or not those:
            continue
        least, widest = sizes[0], sizes[-1]
        grown = (*least[:-1], least[-1] * devices)
        for kind, base, size in (("strong", widest, widest), ("weak", least, grown)):
            if size not in sizes:
                continue
            own = mean_of(those, values_at(size, "step_s"))
            first = mean_of(runs[1], values_at(base, "step_s"))
            ours = ratio_of(own, first)
            reason = no_speedup(those, runs[1], of="one device")
            if own and ours and reason:
                ours = words("no scaling", own.runs, reason.replace("no speedup", "no scaling"))
            row = (name, f"{kind}: {size_text(size)} over {size_text(base)} on 1", str(devices))
            yield Cell(row=row, column=TIMES, ours=ours, expected=False)


def _draw_convnext_tp(block: Block) -> Figure | None:
    if MEMORY not in block.columns:
        return beside_each_other(CONVNEXT_TP, block)
    named = [
        replace(each, row=(f"checkpointing: {each.row[0]}", *each.row[1:])) for each in block.cells
    ]
    return over_sizes(replace(block, cells=tuple(named)), of="device")


CONVNEXT_TP = Chapter(
    name="convnext_tp",
    title="ConvNeXt on images cut along their width (NVIDIA and NIO, Figs. 3 and 4)",
    about=(
        "NVIDIA and NIO train ConvNeXt-XL on images that 1 to 8 devices cut along their width W "
        "of 1024 to 8192, with and without gradient checkpointing; Figs. 3 and 4 draw memory and "
        "time. Of their times 937, 952 and 647 ms are known here, not which runs they are of: "
        "only their ratios are shown, beside ours, and neither is compared with the other. Here "
        "it is a training step of one image, of the rank that needs most: on processors by "
        "torch's own count of what is alive (counted), on GPUs the peak of torch's allocator "
        "(measured). At scale=paper network and widths are theirs, heights are our choice, as is "
        "everything at the other scales. Strong scaling: the time of the widest image over that "
        "on one device; weak scaling: of an image that grows with the devices. Times of more "
        "devices than cores are no scaling, their memory counts. A size above the budget is not "
        "trained."
    ),
    heads=("checkpointing", "size", "devices"),
    find=_convnext_tp_blocks,
    citation=CITATION_OF_CONVNEXT,
    pictured=(TIMES.key,),
    draw=_draw_convnext_tp,
)
