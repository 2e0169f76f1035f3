"""Figs. 2 to 5 of Tsaris and Hinkle: memory over the size of samples that workers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.measured_steps import (
    Setting,
    budget_text,
    largest_cells,
    memory_cells,
    notes_of,
    over_sizes,
    settings_of,
    size_text,
    sizes_of,
)
from sparsepipe.paper.printed import CITATION_OF_BIGCONV, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Row
from sparsepipe.report.commands import Commands


def _printed_workers() -> Mapping[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for row in printed("bigconv"):
        found[row["network"]] = (*found.get(row["network"], ()), int(row["workers"]))
    return found


_WORKERS = _printed_workers()
_NAMES = ("one", "fewer", "most")
"""Values of ``paper.workers``; the last two are the same of a network with two numbers."""


def _overrides(network: str, workers: int) -> tuple[str, ...]:
    """Overrides of a network on a number of workers, which need not be one of the study's."""
    known = _WORKERS[network]
    if workers in known:
        name = _NAMES[known.index(workers)]
        return (f"paper/network={network}", f"paper.workers={name}")
    return (f"paper/network={network}", f"parallel.devices={workers}")


def _command_of(row: Row) -> tuple[str, ...] | None:
    network, ranks = str(row.get("model")), row.get("ranks")
    return _overrides(network, int(ranks)) if network in _WORKERS and ranks else None


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    found = settings_of(rows, commands, _command_of)
    return [
        block
        for setting, (runs, theirs) in found.items()
        for block in _of_setting(setting, runs, theirs)
    ]


def _of_setting(setting: Setting, rows: Sequence[Row], commands: Commands) -> list[Block]:
    memory: list[Cell] = []
    largest: list[Cell] = []
    notes: list[str] = []
    for network, printed_workers in _WORKERS.items():
        of_network = [row for row in rows if row.get("model") == network]
        by_workers = {
            workers: [row for row in of_network if row.get("ranks") == workers]
            for workers in sorted({*printed_workers, *(int(row["ranks"]) for row in of_network)})
        }
        alone = by_workers[1]
        for workers, runs in by_workers.items():
            if setting.is_partial and not runs:
                continue
            label, command = str(workers), commands.one(*_overrides(network, workers))
            largest += largest_cells((network, "largest", label), runs, alone, command=command)
            notes += notes_of(f"{network} on {workers}", runs)
            for size in sizes_of(of_network):
                memory += memory_cells(
                    (network, size_text(size), label),
                    size,
                    runs,
                    alone,
                    ranks=workers,
                    command=command,
                )
    return [
        *([Block(title=setting.title, cells=tuple(memory), notes=tuple(notes))] if memory else []),
        Block(
            title=f"{setting.title}; budget: {budget_text(rows)}",
            cells=tuple(largest),
            sweep=commands.sweep(),
        ),
    ]


def _draw(block: Block) -> Figure | None:
    budgets = {float(run["budget_bytes"]) for run in block.runs if run.get("budget_bytes")}
    return over_sizes(block, budgets_mb=sorted(each / 1e6 for each in budgets), of="worker")


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
    find=_blocks,
    citation=CITATION_OF_BIGCONV,
    draw=_draw,
)
