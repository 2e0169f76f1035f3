"""Runs of ``task=measure_steps``: settings, values at a size, the largest size, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sparsepipe.plots import style
from sparsepipe.report.chapter import Block, Cell, Column, Ours
from sparsepipe.report.measurements import mean_of, ratio_of, words
from sparsepipe.report.tables import of_training, overrides_beside, tables_of
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
"""Elements of samples of one, two and three dimensions."""
_LOOKS: Sequence[Mapping[str, Any]] = (
    {"color": style.INK, "marker": "o"},
    {"color": style.BLUE, "marker": "s", "markerfacecolor": "white"},
    {"color": style.VERMILION, "marker": "^"},
    {"color": style.GREEN, "marker": "D", "markerfacecolor": "white"},
    {"color": style.PURPLE, "marker": "v"},
)
"""Looks of numbers of ranks; marker and filling distinguish them without colour."""


def tables_of_steps(
    rows: Sequence[Row],
    of_cells: Sequence[str],
    *,
    task: str = "measure_steps",
    of_scale: Mapping[str, str] | None = None,
) -> list[tuple[str, str, list[Row]]]:
    """Title, scale and runs of each table; one of the scale ``desk`` if no run exists.

    Args:
        rows: finished runs of an exhibit.
        of_cells: keys and groups that choose a cell.
        task: name of the task whose runs count.
        of_scale: an override that a scale implies, by the scale.
    """
    implied = of_scale or {}
    tables = tables_of(
        [row for row in rows if row["task_name"] == task],
        lambda row: {
            "scale": str(row.get("study.cell.scale")),
            # Measurements of steps test nothing.
            "overrides": overrides_beside(
                row,
                (
                    *(*of_cells, "data.source.test_samples"),
                    implied.get(str(row.get("study.cell.scale")), ""),
                ),
            ),
        },
    )
    return [
        ("; ".join((f"scale {key['scale']}", *key["overrides"])), key["scale"], runs)
        for key, runs in tables
    ] or [("scale desk", "desk", [])]


def sets_apart(key: str) -> bool:
    """Whether a key of the configuration affects the figures of steps."""
    return of_training(key) or key.startswith("task.")


def sizes_of(runs: Iterable[Row]) -> list[Size]:
    """Measured sizes, growing."""
    found = {tuple(each["size"]) for run in runs for each in run.get("measured_sizes", ())}
    return sorted(found, key=math.prod)


def size_text(size: Size) -> str:
    """A size as text, such as 320 x 320 pixels; empty for none."""
    lengths = " x ".join(f"{length:,}" if len(size) == 1 else str(length) for length in size)
    return f"{lengths} {_ELEMENTS[len(size) - 1]}" if size else ""


def values_at(size: Size, key: str) -> Callable[[Row], float | None]:
    """Finds a value of a run at a size."""

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
    """Cells of ``runs`` on a number of ranks at a size, beside those ``alone`` on one rank."""
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
    """Cells of the largest size that a number of ranks trains within the budget."""
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
    """The largest size that all runs train, and the next one."""
    known = [run for run in runs if run.get("largest_size")]
    if not known:
        return None
    run = min(known, key=lambda each: math.prod(each["largest_size"]))
    after = run.get("refused_size")
    return tuple(run["largest_size"]), None if after is None else tuple(after)


def budget_text(runs: Sequence[Row]) -> str:
    """The budgets of runs."""
    found = sorted({float(run["budget_bytes"]) for run in runs if run.get("budget_bytes")})
    return ", ".join(f"{each / 1e6:,.0f} MB" for each in found) or "all of a device's memory"


def over_sizes(block: Block, *, of: str) -> Figure | None:
    """Memory over the size, a panel for each group and a line for each number of ranks.

    A row's labels are group, size and number of ranks, which are called ``of``. Dotted lines are
    the memory of one rank divided by the number of ranks, dashed ones budgets.
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
        _draw_ranks(axes, curves, of=of)
        for budget in budgets_mb:
            axes.axhline(budget, color=style.GREY, linewidth=1.2, linestyle=(0, (6, 3)), zorder=1)
        axes.set_title(group, fontsize=style.TITLE_PT, color=style.INK)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    dashed = "; dashed: the budget" if budgets_mb else ""
    title = f"{block.title}; dotted: that of one over their number{dashed}"
    figure.suptitle(title, fontsize=style.TICK_PT)
    return figure


def _draw_ranks(axes: Axes, curves: Mapping[int, Sequence[tuple[str, float]]], *, of: str) -> None:
    """A curve for each number of ranks, and dotted the share of one."""
    labels = {ranks: f"1 {of}" if ranks == 1 else f"{ranks} {of}s" for ranks in sorted(curves)}
    draw_curves(axes, {label: curves[ranks] for ranks, label in labels.items()})
    for ranks, look in zip(labels, _LOOKS, strict=False):
        if ranks > 1 and 1 in curves:
            places = [_elements(size) for size, _ in curves[1]]
            shares = [value / ranks for _, value in curves[1]]
            axes.plot(places, shares, color=look["color"], linestyle=":", zorder=2)


def draw_curves(axes: Axes, curves: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """Memory over the size, both logarithmic; ``curves`` by label are sizes as text with MB."""
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
