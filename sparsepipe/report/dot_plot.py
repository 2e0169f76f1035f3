"""Ours and the paper's figures as dots on a line for each row, a panel for each quantity."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsepipe.plots import style
from sparsepipe.report.chapter import MISSING, Block, Cell, Chapter, Column, Compare, our_number

_ROW_IN = 0.27
_PANEL_IN = 2.9
_LABEL_IN, _LETTER_IN = 0.45, 0.075  # of rows: without letters, and for each
# Shape and filling distinguish them without colour.
_OURS: dict[str, Any] = {
    "marker": "o", "markersize": 7.0, "markerfacecolor": style.BLUE, "markeredgecolor": style.INK,
    "linestyle": "none",
}  # fmt: skip
_PAPER: dict[str, Any] = {
    "marker": "D", "markersize": 8.0, "markerfacecolor": "white", "markeredgecolor": style.INK,
    "markeredgewidth": 1.4, "linestyle": "none",
}  # fmt: skip


def beside_each_other(chapter: Chapter, block: Block) -> Figure | None:
    """The block's pictured columns; None where none has a figure of ours."""
    columns = [
        column
        for column in block.columns
        if column.key in chapter.pictured
        and any(our_number(cell) is not None for cell in _cells(block, column))
    ]
    if not columns:
        return None
    rows = [", ".join(row) for row in block.rows]
    labels_in = _LABEL_IN + _LETTER_IN * max(map(len, rows))
    figure = style.new_figure(
        width_in=labels_in + _PANEL_IN * len(columns), height_in=1.5 + _ROW_IN * len(rows)
    )
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, column in zip(panels, columns, strict=True):
        _draw(axes, column, block)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[0].set_ylabel(", ".join(chapter.heads), fontsize=style.LABEL_PT, color=style.INK)
    if block.title:
        figure.suptitle(wrapped(block.title, 32 * len(columns)), fontsize=style.TICK_PT)
    figure.legend(
        handles=_legend(block), fontsize=style.TICK_PT, frameon=False,
        loc="outside lower center", ncols=4,
    )  # fmt: skip
    return figure


def _cells(block: Block, column: Column) -> list[Cell | None]:
    return [cells.get(column) for cells in block.rows.values()]


def _paper(cell: Cell | None) -> float | None:
    return None if cell is None or cell.paper is None else cell.paper.value


def _draw(axes: Axes, column: Column, block: Block) -> None:
    for place, cell in enumerate(_cells(block, column)):
        ours, paper = our_number(cell), _paper(cell)
        if ours is not None and paper is not None:
            axes.plot([ours, paper], [place, place], color=style.GREY, linewidth=1.2, zorder=2)
        if paper is not None:
            axes.plot([paper], [place], zorder=3, **_PAPER)
        if ours is not None:
            assert cell is not None
            assert cell.ours is not None
            if cell.ours.spread is not None:
                axes.plot(
                    cell.ours.spread, [place, place], color=style.INK, linewidth=3, zorder=3,
                    solid_capstyle="butt",
                )  # fmt: skip
            axes.plot([ours], [place], zorder=4, **_OURS)
    style.tidy(axes)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    if column.compare is Compare.RATIO:
        axes.set_xlim(left=0)
    style.from_zero(axes, "x")
    axes.set_xlabel(column.title, fontsize=style.LABEL_PT, color=style.INK)
    for place, cell in enumerate(_cells(block, column)):
        if cell is not None and (words := _words(cell)):
            _write(axes, words, place, beside=_paper(cell))


def _write(axes: Axes, words: str, place: int, *, beside: float | None) -> None:
    """Writes words at the end of a row that is farther from the paper's figure."""
    at_right = beside is not None and beside < sum(axes.get_xlim()) / 2
    axes.annotate(
        words, (1 if at_right else 0, place), xycoords=("axes fraction", "data"),
        xytext=(-3 if at_right else 3, 0), textcoords="offset points",
        ha="right" if at_right else "left", va="center",
        fontsize=7.5, color=style.GREY, style="italic", zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _words(cell: Cell) -> str:
    """Text in place of a number of ours."""
    if cell.missing:
        return MISSING
    return cell.ours.value if cell.ours and isinstance(cell.ours.value, str) else ""


def _legend(block: Block) -> list[Line2D]:
    handles = [Line2D([], [], label="the paper's", **_PAPER), Line2D([], [], label="ours", **_OURS)]
    if any(cell.ours is not None and cell.ours.spread is not None for cell in block.cells):
        handles.append(
            Line2D(
                [], [], color=style.INK, linewidth=3, label="ours, least to most of several runs"
            )
        )
    return handles


def wrapped(text: str, width: int) -> str:
    """Wraps a text to about this width, at semicolons."""
    lines = [""]
    for part in text.split("; "):
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        if len(joined) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(lines)
