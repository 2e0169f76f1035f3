"""Quantities over the resolution of the grid, a line for each network (Fig. 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsepipe.results import style
from sparsepipe.results.report.cell import Cell, Column, our_number
from sparsepipe.results.report.exhibit import Block
from sparsepipe.results.report.picture import wrapped

_LINE = 0.08
"""Height of a line of words, of a panel's."""
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    # Line, marker and filling tell them apart without colour.
    "dense": {
        "color": style.VERMILION, "linestyle": "--", "marker": "s", "markerfacecolor": "white",
        "markeredgewidth": 1.6,
    },
    "sparse": {"color": style.BLUE, "linestyle": "-", "marker": "o"},
}  # fmt: skip
_PAPER: Mapping[str, Mapping[str, Any]] = {
    network: {
        "marker": "D", "markersize": 8, "linestyle": "none", "markeredgecolor": style.INK,
        "markerfacecolor": face,
    }
    for network, face in (("dense", "white"), ("sparse", style.INK))
}  # fmt: skip


def over_resolution(block: Block, columns: Sequence[Column]) -> Figure | None:
    """A panel for each column that has figures of ours; None where none has.

    Args:
        block: whose rows are labelled by the grid and the network.
        columns: what to draw.
    """
    shown = [
        column
        for column in columns
        if any(our_number(cell) is not None for cell in block.cells if cell.column is column)
    ]
    if not shown:
        return None
    grids = list(dict.fromkeys(grid for grid, _ in block.rows))
    figure = style.new_figure(width_in=3.2 * len(shown), height_in=3.9)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, column in zip(panels, shown, strict=True):
        _draw(axes, column, block, grids)
    figure.suptitle(wrapped(block.title, 34 * len(shown)), fontsize=style.TICK_PT)
    figure.legend(
        handles=_legend(block), fontsize=style.TICK_PT, frameon=False,
        loc="outside lower center", ncols=4,
    )  # fmt: skip
    return figure


def _draw(axes: Axes, column: Column, block: Block, grids: Sequence[str]) -> None:
    style.tidy(axes)
    words: list[str] = []
    for network, look in _LOOKS.items():
        cells = [block.rows.get((grid, network), {}).get(column) for grid in grids]
        found = [(place, our_number(cell)) for place, cell in enumerate(cells)]
        ours = [(place, value) for place, value in found if value is not None]
        axes.plot([place for place, _ in ours], [value for _, value in ours], zorder=3, **look)
        for place, cell in enumerate(cells):
            if cell is not None and cell.paper is not None and cell.paper.value is not None:
                axes.plot([place], [cell.paper.value], zorder=2, **_PAPER[network])
        words += _words(network, dict(zip(grids, cells, strict=True)))
    axes.set_xticks(range(len(grids)), grids)
    axes.set_xlim(-0.4, len(grids) - 0.6)
    axes.margins(y=0.15)
    _write_below(axes, words)
    axes.set_xlabel("grid", fontsize=style.LABEL_PT, color=style.INK)
    axes.set_ylabel(column.title, fontsize=style.LABEL_PT, color=style.INK)


def _words(network: str, cells: Mapping[str, Cell | None]) -> list[str]:
    """What is said of a network in place of figures, with the grids of which it is said."""
    said: dict[str, list[str]] = {}
    for grid, cell in cells.items():
        if cell is not None and cell.ours is not None and isinstance(cell.ours.value, str):
            said.setdefault(cell.ours.value, []).append(grid)
    return [f"{network} {words}: {', '.join(grids)}" for words, grids in said.items()]


def _write_below(axes: Axes, lines: Sequence[str]) -> None:
    """Lines at the foot of a panel, which gets room for them below its curves."""
    low, high = axes.get_ylim()
    share = _LINE * len(lines)
    axes.set_ylim(low - share / (1 - share) * (high - low), high)
    for number, line in enumerate(reversed(lines)):
        axes.annotate(
            line, (0.02, _LINE * (number + 0.3)), xycoords="axes fraction",
            fontsize=8, style="italic", color=style.INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def _legend(block: Block) -> list[Line2D]:
    handles = [Line2D([], [], label=f"{name}, ours", **look) for name, look in _LOOKS.items()]
    if any(cell.paper is not None for cell in block.cells):
        handles += [
            Line2D([], [], label=f"{name}, the paper's", **look) for name, look in _PAPER.items()
        ]
    return handles
