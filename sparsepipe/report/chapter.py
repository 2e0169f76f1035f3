"""A chapter of a report: a table of printed figures beside ours, and how ours are found.

A :class:`Chapter` is data and one function that finds our figures among the finished runs; all
else (Markdown, CSV, pictures, the HTML page) is made of its :class:`Block` s alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from sparsepipe.report.tables import SweepCommand
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
    """Ours over the paper's, for ratios such as speedups, or for the same device."""
    DIFFERENCE = "difference"
    """Ours less the paper's, in the unit of the column."""
    WORDS = "verdict"
    """By the note, for values that are text."""


HOW_COMPARED = (
    'Columns "ratio" have ours over the paper\'s, where that is a ratio itself, such as a speedup, '
    "or what a kind of GPU reaches, over its data sheet (Table I); never of seconds. Columns "
    '"difference" have ours less the paper\'s; accuracies have it where both are on ModelNet40.'
)
"""Explanation for readers of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A quantity.

    Attributes:
        key: its name in the CSV.
        heading: its name in print.
        unit: in print; empty without one.
        form: how a number of ours is printed.
        compare: whether and how it is set against the paper's.
        printed: the paper prints it; else there is no column for the paper's.
    """

    key: str
    heading: str
    unit: str = ""
    form: str = "{:.2f}"
    compare: Compare = Compare.NOT
    printed: bool = True

    @property
    def title(self) -> str:
        """The heading with the unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

    def text(self, value: float | str) -> str:
        """A value of ours as it is printed."""
        return value if isinstance(value, str) else self.form.format(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The paper's value of a cell.

    Attributes:
        text: digit by digit.
        derived: the source of a value that is not printed; empty if it is printed.
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
        value: the mean over its runs; or words.
        spread: least and most of several runs.
        count: of how many runs it is the mean.
        runs: the finished runs it comes from, those of a baseline too.
        note: explanation, printed below the table.
        counts: it may be compared with the paper's.
    """

    value: float | str
    spread: tuple[float, float] | None = None
    count: int = 1
    runs: tuple[Row, ...]
    note: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A place in a table.

    Attributes:
        row: labels of its row, one for each of the chapter's heads.
        column: the quantity.
        paper: the paper's figure; None where it has none.
        ours: ours; None where no run has it.
        expected: a run of the experiment's sweep has the figure, so that without one it is missing.
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
        """Our value; None where it is missing or text."""
        return None if self.ours is None or isinstance(self.ours.value, str) else self.ours.value

    @property
    def compared(self) -> float | None:
        """Ours against the paper's, as the column says; None where that cannot be."""
        ours, paper = self.number, None if self.paper is None else self.paper.value
        if ours is None or paper is None or (self.ours and not self.ours.counts):
            return None
        if self.column.compare is Compare.RATIO:
            return ours / paper
        return ours - paper if self.column.compare is Compare.DIFFERENCE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Figures that were obtained in the same way, and so may be compared with each other.

    Attributes:
        title: what they have in common; empty where there is nothing to add.
        cells: row by row.
        notes: explanations of the whole block.
        sweep: the command that fills it; empty: that of the experiment.
    """

    title: str = ""
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
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
        """Runs that figures come from, each once."""
        found = [run for cell in self.cells if cell.ours for run in cell.ours.runs]
        return list({str(run.get("run_id")): run for run in found}.values())


Find = Callable[[Sequence[Row], SweepCommand], Sequence[Block]]
Draw: TypeAlias = "Callable[[Block], Figure | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A table or figure of the paper.

    Attributes:
        name: of the experiment that makes it.
        title: in print.
        about: what it shows, what the paper says of it, and how ours is taken.
        heads: what the labels of a row are.
        find: finds our figures; at least one block, of cells to fill if we have no figures.
        citation: what is printed in, that columns "paper" have the figures of.
        pictured: keys of the columns that are drawn.
        draw: a picture of a block in place of the common one.
    """

    name: str
    title: str
    about: str
    heads: tuple[str, ...]
    find: Find
    citation: str
    pictured: tuple[str, ...] = ()
    draw: Draw | None = None

    def blocks(self, rows: Sequence[Row], sweep: SweepCommand | None = None) -> list[Block]:
        """Our figures beside the paper's.

        Args:
            rows: finished runs. Those without its name as ``study.exhibit`` in their results are
                left out with a note, as are trainings that began with trained weights.
            sweep: makes the command that fills a block; None: the experiment's own.
        """
        command = sweep or SweepCommand(experiment=self.name)
        own = [
            row
            for row in rows
            if row.get("study.exhibit") == self.name and not row.get("first_weights")
        ]
        first, *others = (
            replace(block, sweep=block.sweep or command.text()) for block in self.find(own, command)
        )
        shown = {run.get("run_id") for block in (first, *others) for run in block.runs}
        rest = [str(row.get("run_id")) for row in rows if row.get("run_id") not in shown]
        if rest:
            note = f"Left out: {', '.join(rest)}, which fill no cell of this chapter."
            first = replace(first, notes=(*first.notes, note))
        return [first, *others]
