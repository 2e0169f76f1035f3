"""Draws our figures and the paper's as dots: a panel for each quantity, a line for each row."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsepipe.plots import style
from sparsepipe.report.chapter import MISSING, Block, Chapter, Column, Compare

# Shape and filling distinguish the two without colour.
_OURS: dict[str, Any] = {
    "marker": "o", "markersize": 7.0, "markerfacecolor": style.BLUE, "markeredgecolor": style.INK,
    "linestyle": "none",
}  # fmt: skip
_PAPER: dict[str, Any] = {
    "marker": "D", "markersize": 8.0, "markerfacecolor": "white", "markeredgecolor": style.INK,
    "markeredgewidth": 1.4, "linestyle": "none",
}  # fmt: skip
_SPREAD: dict[str, Any] = {"color": style.INK, "linewidth": 3, "solid_capstyle": "butt"}


def beside_each_other(chapter: Chapter, block: Block) -> Figure | None:
    """Draws the block's pictured columns side by side; None if they have no figure of ours."""
    with_figures = {cell.column for cell in block.cells if cell.number is not None}
    columns = [
        column
        for column in block.columns
        if column.key in chapter.pictured and column in with_figures
    ]
    if not columns:
        return None
    rows = [", ".join(row) for row in block.rows]
    figure = style.new_figure(
        width_in=0.45 + 0.075 * max(map(len, rows)) + 2.9 * len(columns),
        height_in=1.5 + 0.27 * len(rows),
    )
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    percent = [axes for axes, column in zip(panels, columns, strict=True) if column.unit == "%"]
    for axes in percent[1:]:
        axes.sharex(percent[0])
    for axes, column in zip(panels, columns, strict=True):
        _draw_column(axes, column, block)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[0].set_ylabel(", ".join(chapter.heads), fontsize=style.LABEL_PT, color=style.INK)
    title = textwrap.fill(
        block.title, 32 * len(columns), break_long_words=False, break_on_hyphens=False
    )
    figure.suptitle(title, fontsize=style.TICK_PT)
    looks = {"ours": _OURS}
    if any(column.printed for column in columns):
        looks = {"the paper's": _PAPER, **looks}
    if any(cell.ours is not None and cell.ours.spread is not None for cell in block.cells):
        looks["ours, smallest to largest of several runs"] = _SPREAD
    figure.legend(
        handles=[Line2D([], [], label=label, **look) for label, look in looks.items()],
        fontsize=style.TICK_PT, frameon=False, loc="outside lower center", ncols=4,
    )  # fmt: skip
    return figure


def _draw_column(axes: Axes, column: Column, block: Block) -> None:
    for place, cells in enumerate(block.rows.values()):
        cell = cells.get(column)
        if cell is None:
            continue
        ours, paper = cell.number, None if cell.paper is None else cell.paper.value
        if ours is not None and paper is not None:
            axes.plot([ours, paper], [place, place], color=style.GREY, linewidth=1.2, zorder=2)
        if paper is not None:
            axes.plot([paper], [place], zorder=3, **_PAPER)
        if ours is not None:
            if cell.ours is not None and cell.ours.spread is not None:
                axes.plot(cell.ours.spread, [place, place], zorder=3, **_SPREAD)
            axes.plot([ours], [place], zorder=4, **_OURS)
        text = MISSING if cell.missing else str(cell.ours.value) if cell.ours else ""
        if ours is None and text:
            axes.annotate(
                text, (0, place), xycoords=("axes fraction", "data"), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7.5, color=style.GREY,
                style="italic",
            )  # fmt: skip
    style.tidy(axes)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    if column.compare is Compare.RATIO:
        axes.set_xlim(left=0)
    style.from_zero(axes, "x")
    axes.set_xlabel(column.title, fontsize=style.LABEL_PT, color=style.INK)
