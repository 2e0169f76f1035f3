"""Figs. 3 and 4 of NVIDIA's and NIO's study: ConvNeXt on images that devices cut along W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.measured_steps import (
    MEMORY,
    Setting,
    Size,
    budget_text,
    largest_cells,
    memory_cells,
    notes_of,
    over_sizes,
    settings_of,
    size_text,
    sizes_of,
    values_at,
)
from sparsepipe.paper.printed import CITATION_OF_CONVNEXT, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours, Printed, Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.report.measurements import crowded, mean_of, no_speedup, ratio_of

STEP = Column(key="step", heading="step", unit="ms", form="{:,.0f}", printed=False)
TIMES = Column(key="times", heading="time over the first", unit="x", form="{:.2f}")
_DEVICES = (1, 2, 4, 8)
_NAMES = {False: "none", True: "all blocks"}
"""Of whether activations are computed again."""

Runs = Mapping[int, Sequence[Row]]
"""By their numbers of devices."""


def _overrides(devices: int, *, checkpointing: bool) -> tuple[str, ...]:
    flag = str(checkpointing).lower()
    return (f"parallel.devices={devices}", f"model.checkpointing={flag}")


def _command_of(row: Row) -> tuple[str, ...] | None:
    if not str(row.get("model")).startswith("convnext") or not row.get("ranks"):
        return None
    again = bool(row.get("model.checkpointing"))
    return _overrides(int(row["ranks"]), checkpointing=again)


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
    ratios: list[Cell] = []
    notes: list[str] = []
    threads = () if setting.extent == "paper" else ("OMP_NUM_THREADS=1",)
    singly = commands.giving(*commands.given, environment=threads)
    for checkpointing, name in _NAMES.items():
        mine = [row for row in rows if bool(row.get("model.checkpointing")) == checkpointing]
        counts = sorted({*_DEVICES, *(int(row["ranks"]) for row in mine)})
        runs = {each: [row for row in mine if row.get("ranks") == each] for each in counts}
        for devices, those in runs.items():
            if setting.is_partial and not those:
                continue
            command = singly.one(*_overrides(devices, checkpointing=checkpointing))
            label = str(devices)
            if devices > 1 and not mine:
                row = (name, "of the widest image, and of one that grows", label)
                ratios.append(Cell(row=row, column=TIMES, command=command))
            largest += largest_cells((name, "largest", label), those, runs[1], command=command)
            notes += notes_of(f"checkpointing {name} on {devices}", those)
            for size in sizes_of(mine):
                row = (name, size_text(size), label)
                memory += memory_cells(row, size, those, runs[1], ranks=devices, command=command)
                memory.append(Cell(row=row, column=STEP, ours=_step(those, size)))
        ratios += _ratios(name, runs, sizes_of(mine))
    return [
        *([Block(title=setting.title, cells=tuple(memory), notes=tuple(notes))] if memory else []),
        Block(
            title=f"{setting.title}; budget: {budget_text(rows)}",
            cells=tuple(largest),
            sweep=commands.sweep(),
        ),
        Block(title=f"{setting.title}; times as ratios", cells=(*_printed_ratios(), *ratios)),
    ]


def _step(runs: Sequence[Row], size: Size) -> Ours | None:
    """Time of a step, marked where ranks take turns."""
    found = mean_of(runs, values_at(size, "step_s"), scale=1e3)
    reason = next((why for run in runs if (why := crowded(run))), "")
    if found is None or not reason:
        return found
    return replace(found, note=reason.replace("no speedup", "no scaling"), counts=False)


def _printed_ratios() -> Iterator[Cell]:
    first, *others = (row["time_ms"] for row in printed("convnext_tp"))
    for each in others:
        yield Cell(
            row=("-", f"printed: {each} over {first} ms", "-"),
            column=TIMES,
            paper=Printed(
                text=f"{float(each) / float(first):.2f}",
                derived="a ratio of two printed times; which runs they are of is not known here",
            ),
        )


def _ratios(name: str, runs: Runs, sizes: Sequence[Size]) -> Iterator[Cell]:
    """Times over that of one device: of the same image, and of one that grows with the devices."""
    if not sizes:
        return
    least, widest = sizes[0], sizes[-1]
    for devices in runs:
        if devices == 1 or not runs[devices]:
            continue
        grown = (*least[:-1], least[-1] * devices)
        for kind, base, size in (("strong", widest, widest), ("weak", least, grown)):
            if size in sizes:
                ours = _over(runs[devices], size, runs[1], base)
                yield Cell(
                    row=(
                        name,
                        f"{kind}: {size_text(size)} over {size_text(base)} on 1",
                        str(devices),
                    ),
                    column=TIMES,
                    ours=ours,
                )


def _over(runs: Sequence[Row], size: Size, alone: Sequence[Row], base: Size) -> Ours | None:
    own = mean_of(runs, values_at(size, "step_s"))
    first = mean_of(alone, values_at(base, "step_s"))
    if own is None or first is None:
        return None
    reasons = (no_speedup(run, alone[0], of="one device") for run in runs)
    if reason := next((why for why in reasons if why), ""):
        note = reason.replace("no speedup", "no scaling")
        return Ours(value="no scaling", runs=own.runs, note=note, counts=False)
    return ratio_of(own, first)


def _draw(block: Block) -> Figure | None:
    if MEMORY not in block.columns:
        return beside_each_other(CONVNEXT_TP, block)
    budgets = {float(run["budget_bytes"]) for run in block.runs if run.get("budget_bytes")}
    named = [
        replace(each, row=(f"checkpointing: {each.row[0]}", *each.row[1:])) for each in block.cells
    ]
    return over_sizes(
        replace(block, cells=tuple(named)),
        budgets_mb=sorted(each / 1e6 for each in budgets),
        of="device",
    )


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
    find=_blocks,
    citation=CITATION_OF_CONVNEXT,
    pictured=(TIMES.key,),
    draw=_draw,
)
