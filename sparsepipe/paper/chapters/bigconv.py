"""Figs. 2 to 5 of Tsaris and Hinkle: memory over the size of samples that workers share."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.paper.chapters.measured_steps import (
    budget_text,
    largest_cells,
    memory_cells,
    over_sizes,
    sets_apart,
    size_text,
    sizes_of,
    tables_of_steps,
)
from sparsepipe.paper.printed import CITATION_OF_BIGCONV, printed
from sparsepipe.report.chapter import Block, Cell, Chapter
from sparsepipe.report.measurements import unlike_notes
from sparsepipe.runs.ledger_table import Row

_OF_CELLS = ("paper/network", "paper.workers", "parallel.devices", "parallel.grid")


def _bigconv_blocks(rows: Sequence[Row]) -> list[Block]:
    """Two blocks of a table: memory at each size, and the largest sizes."""
    blocks = []
    printed_workers: dict[str, set[int]] = {}
    for row in printed("bigconv"):
        printed_workers.setdefault(row["network"], set()).add(int(row["workers"]))
    for title, scale, runs in tables_of_steps(rows, _OF_CELLS):
        memory: list[Cell] = []
        largest: list[Cell] = []
        notes: list[str] = []
        for network, workers in printed_workers.items():
            own = [row for row in runs if row.get("study.cell.network") == network]
            alone = [row for row in own if row["study.cell.workers"] == 1]
            for count in sorted(workers | {row["study.cell.workers"] for row in own}):
                those = [row for row in own if row["study.cell.workers"] == count]
                if scale == "smoke" and not those:  # it sweeps only some
                    continue
                largest += largest_cells((network, "largest", str(count)), those, alone)
                notes += [
                    f"{network} on {count}: {note}" for note in unlike_notes(those, sets_apart)
                ]
                for size in sizes_of(own):
                    label = (network, size_text(size), str(count))
                    memory += memory_cells(label, size, those, alone, ranks=count)
        if memory:
            blocks.append(Block(title=title, cells=tuple(memory), notes=tuple(notes)))
        budget = f"{title}; budget: {budget_text(runs)}"
        blocks.append(Block(title=budget, cells=tuple(largest)))
    return blocks


BIGCONV = Chapter(
    name="bigconv",
    title="Memory of samples that workers share (Tsaris and Hinkle, Figs. 2 to 5)",
    about=(
        "Tsaris and Hinkle cut samples of CNN1D, CNN2D, CNN3D and FCN2D over a grid of workers, "
        "which exchange halos. Their Figs. 2 to 5 draw peak memory over the size of the input, on "
        "1, 6 and 12, on 1, 5 and 10, on 1, 9 and 28, and on 1 and 10 workers: these numbers are "
        "theirs; of the curves we have no figures. Here it is a training step of one sample, of "
        "the rank that needs most: on processors by torch's own count of what is alive (counted), "
        "on GPUs the peak of torch's allocator (measured). Networks, sizes and budgets are our "
        "choice. A size above the budget is not trained; among those that were tried the largest "
        "within it is given. More workers than cores are for their memory only: no time is "
        "measured."
    ),
    heads=("network", "size", "workers"),
    find=_bigconv_blocks,
    citation=CITATION_OF_BIGCONV,
    draw=lambda block: over_sizes(block, of="worker"),
)
