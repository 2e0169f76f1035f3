"""Training steps on samples cut over ranks: Figs. 2 to 5 of Tsaris and Hinkle, Figs. 3 and 4 of
NVIDIA and NIO, and what both need: values at a sample size, the largest size, and curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sparsepipe.paper.printed import CITATION_OF_BIGCONV, CITATION_OF_CONVNEXT, printed
from sparsepipe.plots import style
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
from sparsepipe.report.tables import Key, of_training, overrides_beside, tables_of
from sparsepipe.runs.ledger_table import Row

Size = tuple[int, ...]

MEMORY = Column(
    key="memory", heading="memory of the largest rank", unit="MB", form="{:,.1f}", printed=False
)
SAVED = Column(
    key="saved", heading="kept for the backward", unit="MB", form="{:,.1f}", printed=False
)
OVER_ONE = Column(key="over_one", heading="memory over one", unit="x", form="{:.3f}", printed=False)
SHARE = Column(key="share", heading="1/P", unit="x", form="{:.3f}", printed=False)
WITHIN = Column(key="within", heading="within the budget", printed=False)
LARGEST = Column(key="largest", heading="largest size within the budget", printed=False)
TIMES_LARGER = Column(
    key="times_larger", heading="over that of one", unit="x", form="{:.1f}", printed=False
)

_ELEMENTS = ("values", "pixels", "voxels")
"""Names of the elements of samples in one, two and three dimensions."""
_LOOKS: Sequence[Mapping[str, Any]] = (
    {"color": style.INK, "marker": "o"},
    {"color": style.BLUE, "marker": "s", "markerfacecolor": "white"},
    {"color": style.VERMILION, "marker": "^"},
    {"color": style.GREEN, "marker": "D", "markerfacecolor": "white"},
    {"color": style.PURPLE, "marker": "v"},
)
"""Looks of curves, one for each number of ranks; markers tell them apart without colour."""


def tables_of_steps(
    rows: Sequence[Row],
    of_cells: Sequence[str],
    *,
    task: str = "measure_steps",
    of_scale: Mapping[str, str] | None = None,
) -> list[tuple[str, str, list[Row]]]:
    """The title, scale and runs of each table; without runs, one empty table of scale ``desk``.

    Args:
        rows: finished runs of an exhibit.
        of_cells: keys and groups of the configuration that choose a cell.
        task: name of the task whose runs count.
        of_scale: by scale, an override that the scale implies; titles omit it.
    """

    def key_of(row: Row) -> Key:
        scale = str(row.get("study.cell.scale"))
        # Measuring steps involves no test.
        left_out = (*of_cells, "data.source.test_samples", (of_scale or {}).get(scale, ""))
        return {"scale": scale, "overrides": overrides_beside(row, left_out)}

    tables = tables_of([row for row in rows if row["task_name"] == task], key_of)
    return [
        ("; ".join((f"scale {key['scale']}", *key["overrides"])), key["scale"], runs)
        for key, runs in tables
    ] or [("scale desk", "desk", [])]


def sets_apart(key: str) -> bool:
    """Whether a key of the configuration affects the results of measured steps."""
    return of_training(key) or key.startswith("task.")


def sizes_of(runs: Iterable[Row]) -> list[Size]:
    """The sample sizes that ``runs`` measured, in increasing order of their elements."""
    found = {tuple(each["size"]) for run in runs for each in run.get("measured_sizes", ())}
    return sorted(found, key=math.prod)


def size_text(size: Size) -> str:
    """A sample size as text, such as ``320 x 320 pixels``; empty for an empty size."""
    lengths = " x ".join(f"{length:,}" if len(size) == 1 else str(length) for length in size)
    return f"{lengths} {_ELEMENTS[len(size) - 1]}" if size else ""


def values_at(size: Size, key: str) -> Callable[[Row], float | None]:
    """A function of a run that returns its value ``key`` at ``size``, or None if it has none."""

    def value(row: Row) -> float | None:
        measured: Iterable[Mapping[str, Any]] = row.get("measured_sizes", ())
        found: float | None = next((e.get(key) for e in measured if tuple(e["size"]) == size), None)
        return found

    return value


def memory_cells(
    label: tuple[str, str, str],
    size: Size,
    runs: Sequence[Row],
    alone: Sequence[Row],
    *,
    ranks: int,
) -> list[Cell]:
    """Cells with the memory of ``runs`` on ``ranks`` ranks, also over that of ``alone``, on one."""
    peak = mean_of(runs, values_at(size, "peak_bytes"), scale=1e-6)
    base = mean_of(alone, values_at(size, "peak_bytes"), scale=1e-6)
    refused = [run for run in runs if values_at(size, "fits")(run) is False]
    answers = [fits for run in runs if (fits := values_at(size, "fits")(run)) is not None]
    within = None
    if answers and any(run.get("budget_bytes") for run in runs):
        within = words("yes" if all(answers) else "no, not trained", runs)
    found = (
        (MEMORY, peak or (words("out of memory", refused) if refused else None)),
        (OVER_ONE, ratio_of(peak, base)),
        (SHARE, Ours(value=1 / ranks, runs=tuple(runs)) if runs else None),
        (SAVED, mean_of(runs, values_at(size, "saved_bytes"), scale=1e-6)),
        (WITHIN, within),
    )
    return [
        Cell(row=label, column=column, ours=ours, expected=column is MEMORY)
        for column, ours in found
    ]


def largest_cells(
    label: tuple[str, str, str], runs: Sequence[Row], alone: Sequence[Row]
) -> list[Cell]:
    """Cells with the largest size that ``runs`` train, also relative to ``alone`` on one rank."""
    own, base = _largest(runs), _largest(alone)
    ratio = None
    if own is not None and base is not None:
        times = math.prod(own[0]) / math.prod(base[0])
        ratio = Ours(value=times, runs=(*runs, *(each for each in alone if each not in runs)))
    largest = None
    if own is not None:
        size, after = own
        note = "none larger was tried" if after is None else f"the next, {size_text(after)}, is not"
        largest = words(size_text(size), runs, note)
    return [
        Cell(row=label, column=LARGEST, ours=largest),
        Cell(row=label, column=TIMES_LARGER, ours=ratio, expected=False),
    ]


def _largest(runs: Sequence[Row]) -> tuple[Size, Size | None] | None:
    """The largest size that all runs train, and the next larger one that was tried, if any."""
    known = [run for run in runs if run.get("largest_size")]
    if not known:
        return None
    run = min(known, key=lambda each: math.prod(each["largest_size"]))
    after = run.get("refused_size")
    return tuple(run["largest_size"]), None if after is None else tuple(after)


def budget_text(runs: Sequence[Row]) -> str:
    """The memory budgets of ``runs`` as text; all of a device's memory if they have none."""
    found = sorted({float(run["budget_bytes"]) for run in runs if run.get("budget_bytes")})
    return ", ".join(f"{each / 1e6:,.0f} MB" for each in found) or "all of a device's memory"


def over_sizes(block: Block, *, of: str) -> Figure | None:
    """Draws memory over sample size, a panel for each group and a line for each number of ranks.

    A row's labels are group, size and number of ranks; ``of``: what a rank is called (``worker``).
    Dotted lines are the memory of one rank divided by the number of ranks, dashed lines budgets.
    """
    found: dict[str, dict[int, list[tuple[str, float]]]] = {}
    for (group, size, ranks), cells in block.rows.items():
        if MEMORY in cells and (value := cells[MEMORY].number) is not None:
            found.setdefault(group, {}).setdefault(int(ranks), []).append((size, value))
    if not found:
        return None
    budgets_mb = sorted(
        {run["budget_bytes"] / 1e6 for run in block.runs if run.get("budget_bytes")}
    )
    columns = min(len(found), 2)
    lines = -(-len(found) // columns)
    figure = style.new_figure(width_in=5.2 * columns, height_in=0.5 + 3.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (group, curves) in zip(panels, found.items(), strict=False):
        labels = {number: f"{number} {of}{'s' if number > 1 else ''}" for number in sorted(curves)}
        draw_curves(axes, {label: curves[number] for number, label in labels.items()})
        for number, look in zip(labels, _LOOKS, strict=False):
            if number > 1 and 1 in curves:
                places = [_elements(size) for size, _ in curves[1]]
                shares = [value / number for _, value in curves[1]]
                axes.plot(places, shares, color=look["color"], linestyle=":", zorder=2)
        for budget in budgets_mb:
            axes.axhline(budget, color=style.GREY, linewidth=1.2, linestyle=(0, (6, 3)), zorder=1)
        axes.set_title(group, fontsize=style.TITLE_PT, color=style.INK)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    dashed = "; dashed: the budget" if budgets_mb else ""
    title = f"{block.title}; dotted: that of one over their number{dashed}"
    figure.suptitle(title, fontsize=style.TICK_PT)
    return figure


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """Draws memory over sample size, both logarithmic; ``curves``: sizes and MB, by label."""
    style.tidy(axes)
    sizes = {size: _elements(size) for points in curves.values() for size, _ in points}
    units = dict.fromkeys(size.rpartition(" ")[2] for size in sizes)
    for (label, points), look in zip(curves.items(), _LOOKS, strict=False):
        places, values = zip(*((sizes[size], value) for size, value in points), strict=True)
        axes.plot(places, values, label=label, linewidth=1.6, zorder=3, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ordered = sorted(sizes, key=lambda size: sizes[size])
    lengths = [size.rpartition(" ")[0] for size in ordered]
    axes.set_xticks([sizes[size] for size in ordered], lengths, rotation=30, ha="right")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
        f"size of a sample ({' or '.join(units)})", fontsize=style.LABEL_PT, color=style.INK
    )
    axes.set_ylabel(MEMORY.title, fontsize=style.LABEL_PT, color=style.INK)
    axes.legend(fontsize=style.TICK_PT, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _elements(text: str) -> int:
    lengths, _, _ = text.rpartition(" ")
    return math.prod(int(part.replace(",", "")) for part in lengths.split(" x "))


_OF_BIGCONV = ("paper/network", "paper.workers", "parallel.devices", "parallel.grid")


def _bigconv_blocks(rows: Sequence[Row]) -> list[Block]:
    """Two blocks for each table: memory at each size, and the largest sizes."""
    blocks = []
    printed_workers: dict[str, set[int]] = {}
    for row in printed("bigconv"):
        printed_workers.setdefault(row["network"], set()).add(int(row["workers"]))
    for title, scale, runs in tables_of_steps(rows, _OF_BIGCONV):
        memory: list[Cell] = []
        largest: list[Cell] = []
        notes: list[str] = []
        for network, workers in printed_workers.items():
            own = [row for row in runs if row.get("study.cell.network") == network]
            alone = [row for row in own if row["study.cell.workers"] == 1]
            for count in sorted(workers | {row["study.cell.workers"] for row in own}):
                those = [row for row in own if row["study.cell.workers"] == count]
                if scale == "smoke" and not those:  # this scale sweeps only some
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
        "theirs; the values of the curves are not printed. Ours is the memory of a training step "
        "on one sample, on the rank that needs most: on CPUs the bytes of live tensors (counted), "
        "on GPUs the peak of torch's allocator (measured). Networks, sizes and budgets are our "
        "choice. A size above the budget is not trained; the largest within it is that of the "
        "sizes that were tried. No time is measured, so that workers may outnumber cores."
    ),
    heads=("network", "size", "workers"),
    find=_bigconv_blocks,
    citation=CITATION_OF_BIGCONV,
    draw=lambda block: over_sizes(block, of="worker"),
)


STEP = Column(key="step", heading="step", unit="ms", form="{:,.0f}", printed=False)
TIMES = Column(key="times", heading="time over the first", unit="x", form="{:.2f}")
_OF_CONVNEXT = ("parallel.devices", "parallel.grid", "model.checkpointing")
_DEVICES = {1, 2, 4, 8}
_RATIO_OF_TIMES = "a ratio of two printed times; which runs they are of is not known here"


def _convnext_tp_blocks(rows: Sequence[Row]) -> list[Block]:
    """Three blocks for each table: memory and time at each size, largest sizes, ratios of times."""
    blocks = []
    for title, scale, table in tables_of_steps(
        rows, _OF_CONVNEXT, of_scale={"paper": "model=convnext_xl"}
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
                if scale == "smoke" and not those:  # this scale sweeps only some
                    continue
                if devices > 1 and not own:
                    row = (name, "of the widest image, and of one that grows", str(devices))
                    ratios.append(Cell(row=row, column=TIMES))
                largest += largest_cells((name, "largest", str(devices)), those, runs[1])
                notes += [
                    f"checkpointing {name} on {devices}: {note}"
                    for note in unlike_notes(those, sets_apart)
                ]
                reasons = (crowded(run).replace("no speedup", "no scaling") for run in those)
                crowded_reason = next(filter(None, reasons), "")
                for size in sizes:
                    row = (name, size_text(size), str(devices))
                    memory += memory_cells(row, size, those, runs[1], ranks=devices)
                    step = mean_of(those, values_at(size, "step_s"), scale=1e3)
                    if step is not None and crowded_reason:  # ranks take turns
                        step = replace(step, note=crowded_reason, counts=False)
                    memory.append(Cell(row=row, column=STEP, ours=step, expected=False))
            ratios += _ratios(name, runs, sizes)
        budget = f"{title}; budget: {budget_text(table)}"
        found = (title, memory), (budget, largest), (f"{title}; times as ratios", ratios)
        blocks += [Block(title=title, cells=tuple(cells)) for title, cells in found if cells]
        blocks[-1] = replace(blocks[-1], notes=tuple(notes))
    return blocks


def _ratios(name: str, runs: Mapping[int, Sequence[Row]], sizes: Sequence[Size]) -> Iterator[Cell]:
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
        "time. Three of their times are known here, 937, 952 and 647 ms, but not their runs: the "
        "ratios are shown next to ours without a comparison. Ours are memory and time of a "
        "training step on one image, on the rank that needs most: on CPUs the bytes of live "
        "tensors (counted), on GPUs the peak of torch's allocator (measured). At scale=paper, "
        "network and widths are theirs; heights are our choice, as is everything at other scales. "
        "Strong scaling is the time of the widest image over that on one device; weak scaling is "
        "that of an image that grows with the devices over the smallest image's on one device. "
        "With more devices than cores, only memory counts. A size above the budget is not trained."
    ),
    heads=("checkpointing", "size", "devices"),
    find=_convnext_tp_blocks,
    citation=CITATION_OF_CONVNEXT,
    pictured=(TIMES.key,),
    draw=_draw_convnext_tp,
)
