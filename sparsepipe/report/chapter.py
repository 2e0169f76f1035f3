"""A chapter of a report: a table of the paper's figures beside ours, and how ours are found.

A :class:`Chapter` is data and a function that takes our figures from finished runs;
Markdown, CSV, pictures and the HTML page are made from its blocks (:class:`Block`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from sparsepipe.runs.best import NONFINITE
from sparsepipe.runs.ledger_table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "missing"
"""Text of a cell that no run has filled yet."""


class Compare(Enum):
    """How our value is compared with the paper's."""

    NOT = ""
    """Not compared: seconds and bytes depend on the machine and the size of the training."""
    RATIO = "ratio"
    """Ours divided by the paper's, for ratios such as speedups, or for the same device."""
    DIFFERENCE = "difference"
    """Ours minus the paper's, in the unit of the column."""
    WORDS = "verdict"
    """Compared in words, by the note of our value, which is text."""


HOW_COMPARED = (
    'Columns "ratio" show our value divided by the paper\'s, if this is itself a ratio, such as a '
    "speedup, or what a kind of GPU reaches, divided by its data sheet (Table I); never of seconds."
    ' Columns "difference" show our value minus the paper\'s, for accuracies if both are on '
    "ModelNet40."
)
"""Explanation of the comparison, for readers of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A quantity that a table shows.

    Attributes:
        key: name in the CSV.
        heading: name in print.
        unit: unit in print, if any.
        form: format string for our numbers.
        compare: whether and how our value is compared with the paper's.
        printed: whether the paper prints the quantity; if so, its values are shown next to ours.
    """

    key: str
    heading: str
    unit: str = ""
    form: str = "{:.2f}"
    compare: Compare = Compare.NOT
    printed: bool = True

    @property
    def title(self) -> str:
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

    def text(self, value: float | str) -> str:
        return value if isinstance(value, str) else self.form.format(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The paper's value of a cell.

    Attributes:
        text: the value as printed, digit by digit.
        derived: how the value follows from other printed values; empty if it is printed itself.
    """

    text: str
    derived: str = ""

    @property
    def value(self) -> float | None:
        """The value as a number; None if it is text."""
        try:
            return float(self.text)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our value of a cell.

    Attributes:
        value: the mean over its runs, or text.
        spread: smallest and largest value, if several runs are averaged.
        count: number of averaged runs.
        runs: the finished runs that it comes from, including those of a baseline.
        note: explanation, printed below the table.
        counts: whether the value may be compared with the paper's.
    """

    value: float | str
    spread: tuple[float, float] | None = None
    count: int = 1
    runs: tuple[Row, ...]
    note: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table, with the paper's and our value of a quantity.

    Attributes:
        row: labels of its row, one for each of the chapter's heads.
        column: the quantity.
        paper: the paper's figure, if any.
        ours: our figure, if any run has it.
        expected: whether the experiment's sweep should yield our figure; if so, the cell counts as
            missing as long as no run has it.
    """

    row: tuple[str, ...]
    column: Column
    paper: Printed | None = None
    ours: Ours | None = None
    expected: bool = True

    @property
    def missing(self) -> bool:
        return self.ours is None and self.expected

    @property
    def number(self) -> float | None:
        """Our value as a number; None if it is missing or text."""
        return None if self.ours is None or isinstance(self.ours.value, str) else self.ours.value

    @property
    def compared(self) -> float | None:
        """The ratio or difference of our value and the paper's; None if they are not compared."""
        ours, paper = self.number, None if self.paper is None else self.paper.value
        if ours is None or paper is None or (self.ours and not self.ours.counts):
            return None
        if self.column.compare is Compare.RATIO:
            return ours / paper
        return ours - paper if self.column.compare is Compare.DIFFERENCE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Figures with the same settings, which may therefore be compared with each other.

    Attributes:
        title: settings that the figures have in common, if any.
        cells: the cells, row by row.
        notes: explanations of the whole block.
        overrides: for each command that fills the block, its further overrides as one text.
        sweep: these commands as text; set by :meth:`Chapter.blocks`.
    """

    title: str = ""
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ("",)
    sweep: str = ""

    @property
    def columns(self) -> list[Column]:
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
        """The runs of all our figures; a run with several of them is listed once."""
        found = [run for cell in self.cells if cell.ours for run in cell.ours.runs]
        return list({str(run.get("run_id")): run for run in found}.values())


Find = Callable[[Sequence[Row]], Sequence[Block]]
Draw: TypeAlias = "Callable[[Block], Figure | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A table or figure of the paper.

    Attributes:
        name: name of the experiment that makes its figures.
        title: title in print.
        about: explanation of the figures.
        heads: headings of a row's labels.
        find: makes blocks from finished runs: at least one, even if all its cells are empty.
        citation: source of the figures in columns "paper".
        pictured: keys of the columns that are drawn.
        draw: draws a block; None: as :func:`sparsepipe.report.dot_plot.beside_each_other` does.
    """

    name: str
    title: str
    about: str
    heads: tuple[str, ...]
    find: Find
    citation: str
    pictured: tuple[str, ...] = ()
    draw: Draw | None = None

    def blocks(self, rows: Sequence[Row], given: Sequence[str] = ()) -> list[Block]:
        """The blocks of the chapter, with our figures beside the paper's.

        Args:
            rows: finished runs; those of another ``study.exhibit`` are left out with a note, as are
                trainings that began with trained weights or have diverged.
            given: overrides of the commands that fill the blocks, such as ``name=mine``.
        """
        own = [
            row
            for row in rows
            if row.get("study.exhibit") == self.name
            and not (row.get("first_weights") or row.get(NONFINITE))
        ]
        blocks = []
        for block in self.find(own):
            scales = (run.get("scale") or run.get("study.cell.scale") for run in block.runs)
            words = [f"experiment={self.name}", *given]
            words += [f"scale={scale}" for scale in dict.fromkeys(scales) if scale]
            command = shlex.join(["sparsepipe", "-m", *words])
            commands = (f"{command} {overrides}".rstrip() for overrides in block.overrides)
            blocks.append(replace(block, sweep=" && ".join(commands)))
        first, *others = blocks
        shown = {run.get("run_id") for block in (first, *others) for run in block.runs}
        rest = [str(row.get("run_id")) for row in rows if row.get("run_id") not in shown]
        if rest:
            note = f"Left out: {', '.join(rest)}, which fill no cell of this chapter."
            first = replace(first, notes=(*first.notes, note))
        return [first, *others]
