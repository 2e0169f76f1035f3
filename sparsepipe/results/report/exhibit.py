"""A table or figure of the paper: its blocks of cells, and where ours are found.

An :class:`Exhibit` is data and one function that finds our figures among the finished runs; all
else (Markdown, CSV, pictures, the HTML page) is made of its :class:`Block` s alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from sparsepipe.results.paper import CITATION
from sparsepipe.results.report.cell import Cell, Column, Row
from sparsepipe.results.report.commands import Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Figures that came about alike, and so may be compared with each other.

    Attributes:
        title: what they have in common; empty where nothing is to be told.
        cells: row by row.
        notes: what is to be known of the whole block.
        sweep: the command that fills all of it; empty where there is none.
    """

    title: str = ""
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    sweep: str = ""

    @property
    def columns(self) -> list[Column]:
        """Those of its cells."""
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def rows(self) -> dict[tuple[str, ...], dict[Column, Cell]]:
        """Cells by the labels of their row, then by column."""
        found: dict[tuple[str, ...], dict[Column, Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.row, {})[cell.column] = cell
        return found

    @property
    def runs(self) -> list[Row]:
        """All that its figures come from, each once."""
        found = {
            str(run.get("run_id")): run
            for cell in self.cells
            if cell.ours
            for run in cell.ours.runs
        }
        return list(found.values())


Find = Callable[[Sequence[Row], Commands], Sequence[Block]]
Draw = Callable[[Block], Figure | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """A table or figure of the paper.

    Attributes:
        name: of the experiment that makes it.
        title: in print.
        about: what it shows, what the paper says of it, and how ours is taken.
        heads: what the labels of a row are.
        find: finds our figures; at least one block, of cells to fill where there are none.
        pictured: keys of the columns that are drawn.
        draw: a picture of a block in place of the common one.
        citation: of what columns "paper" have the figures of.
    """

    name: str
    title: str
    about: str
    heads: tuple[str, ...]
    find: Find
    pictured: tuple[str, ...] = ()
    draw: Draw | None = None
    citation: str = CITATION

    def blocks(self, rows: Sequence[Row], commands: Commands | None = None) -> list[Block]:
        """Our figures beside the paper's.

        Args:
            rows: finished runs of its experiment.
            commands: make the commands that fill its cells; None: as nothing is known but its name.
        """
        return list(self.find(rows, commands or Commands(experiment=self.name)))
