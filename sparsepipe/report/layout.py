"""The layout of blocks of figures that Markdown and HTML share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from matplotlib.figure import Figure

from sparsepipe.report.chapter import MISSING, Block, Cell, Chapter, Column, Compare, Ours, Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.report.measurements import Place, letters

NOTHING = "-"


class Role(Enum):
    """The origin of a text."""

    LABEL = "label"
    PAPER = "paper"
    OURS = "ours"
    COMPARED = "compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A cell of what is set."""

    role: Role
    text: str
    small: str = ""
    marks: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        small = f" ({self.small})" if self.small else ""
        marks = f" [{', '.join(self.marks)}]" if self.marks else ""
        return self.text + small + marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Columns of one quantity."""

    title: str
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Cells that one command fills."""

    command: str
    cells: Mapping[str, tuple[str, ...]]

    @property
    def text(self) -> str:
        return "; ".join(
            f"{row}: {', '.join(names)}" if names else row for row, names in self.cells.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """A block as it is set.

    Attributes:
        title: of the block.
        groups: of columns.
        rows: as many texts each as the groups have columns.
        footnotes: by their marks.
        notes: on all of it.
        gaps: what is missing.
        sweep: the command that fills all gaps; empty where there is none.
        places: where its figures were taken, by their letters.
        runs: number of runs from each place.
        uncounted: cells of ours in words or with a bound, which cannot be compared.
    """

    title: str
    groups: tuple[Group, ...]
    rows: tuple[tuple[Text, ...], ...]
    footnotes: Mapping[str, str]
    notes: tuple[str, ...]
    gaps: tuple[Gap, ...]
    sweep: str
    places: Mapping[str, Place]
    runs: Mapping[str, int]
    uncounted: int

    @property
    def filled(self) -> tuple[int, int]:
        """Cells with a figure of ours, and all that may have one."""
        ours = [text for row in self.rows for text in row if text.role is Role.OURS]
        fillable = [text for text in ours if text.text != NOTHING]
        return sum(text.text != MISSING for text in fillable), len(fillable)

    @property
    def counted(self) -> str:
        filled, fillable = self.filled
        words = f", {self.uncounted} of them in words or as a bound" if self.uncounted else ""
        return f"{filled} of {fillable} figures are there{words}."


def block_layout(chapter: Chapter, block: Block) -> BlockLayout:
    """A block of a chapter as texts."""
    places = letters(block.runs)
    numbers: dict[str, str] = {}
    rows = tuple(
        tuple(_row(labels, cells, block.columns, places, numbers))
        for labels, cells in block.rows.items()
    )
    counts = {
        letter: sum(Place.of(run) == place for run in block.runs)
        for place, letter in places.items()
    }
    return BlockLayout(
        title=block.title,
        groups=(
            Group(title="", heads=chapter.heads),
            *(Group(title=column.title, heads=tuple(_heads(column))) for column in block.columns),
        ),
        rows=rows,
        footnotes={number: note for note, number in numbers.items()},
        notes=block.notes,
        gaps=tuple(gaps(chapter, block)),
        sweep=block.sweep,
        places={letter: place for place, letter in places.items()},
        runs=counts,
        uncounted=sum(cell.ours is not None and not cell.ours.counts for cell in block.cells),
    )


def _heads(column: Column) -> Iterator[str]:
    if column.printed:
        yield "paper"
    yield "ours"
    if column.compare is not Compare.NOT:
        yield column.compare.value


def _row(
    labels: Sequence[str],
    cells: Mapping[Column, Cell],
    columns: Sequence[Column],
    places: Mapping[Place, str],
    numbers: dict[str, str],
) -> Iterator[Text]:
    yield from (Text(role=Role.LABEL, text=label) for label in labels)
    for column in columns:
        cell = cells.get(column) or Cell(row=tuple(labels), column=column)
        if column.printed:
            yield _paper(cell, numbers)
        yield _ours(cell, places, numbers)
        if column.compare is not Compare.NOT:
            yield Text(role=Role.COMPARED, text=compared_text(cell))


def _paper(cell: Cell, numbers: dict[str, str]) -> Text:
    paper = cell.paper
    if paper is None:
        return Text(role=Role.PAPER, text=NOTHING)
    marks = (_number(paper.derived, numbers),) if paper.derived else ()
    return Text(role=Role.PAPER, text=paper.text, marks=marks)


def _ours(cell: Cell, places: Mapping[Place, str], numbers: dict[str, str]) -> Text:
    ours = cell.ours
    if ours is None:
        return Text(role=Role.OURS, text=MISSING if cell.missing else NOTHING)
    where = sorted({places[Place.of(run)] for run in ours.runs})
    is_note = ours.note and cell.column.compare is not Compare.WORDS
    return Text(
        role=Role.OURS,
        text=cell.column.text(ours.value),
        small=spread_text(cell.column, ours),
        marks=(*where, *((_number(ours.note, numbers),) if is_note else ())),
    )


def _number(note: str, numbers: dict[str, str]) -> str:
    return numbers.setdefault(note, str(len(numbers) + 1))


def spread_text(column: Column, ours: Ours) -> str:
    """Least and most of several runs and their number; empty where there is one."""
    if ours.spread is None:
        return ""
    least, most = (column.text(value) for value in ours.spread)
    return f"{least} to {most}, {ours.count} runs"


def compared_text(cell: Cell) -> str:
    """Our value against the paper's, as it is printed."""
    if cell.column.compare is Compare.WORDS:
        return (cell.ours.note if cell.ours else "") or NOTHING
    value = cell.compared
    if value is None:
        return NOTHING
    return f"{value:.2f}" if cell.column.compare is Compare.RATIO else f"{value:+.2f}"


def gaps(chapter: Chapter, block: Block) -> Iterator[Gap]:
    """Missing cells, by the command that fills them."""
    by_command: dict[str, dict[str, list[str]]] = {}
    for labels, cells in block.rows.items():
        missing = [cell for cell in cells.values() if cell.missing]
        heads = zip(chapter.heads, labels, strict=True)
        row = ", ".join(f"{head} {label}" for head, label in heads)
        is_all = len(missing) == len(cells) and len({cell.command for cell in missing}) == 1
        for cell in missing:
            names = by_command.setdefault(cell.command, {}).setdefault(row, [])
            if not is_all:  # else the row alone is clear
                names.append(cell.column.heading)
    for command, rows in by_command.items():
        yield Gap(command=command, cells={row: tuple(names) for row, names in rows.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledChapter:
    """A chapter with our figures."""

    definition: Chapter
    found: tuple[Block, ...]
    blocks: tuple[BlockLayout, ...]
    pictures: tuple[tuple[str, ...], ...]
    figures: Mapping[str, Figure]


def fill(chapter: Chapter, rows: Sequence[Row], commands: Commands | None = None) -> FilledChapter:
    """Fills a chapter from finished runs."""
    found = tuple(chapter.blocks(rows, commands))
    draw = chapter.draw or (lambda block: beside_each_other(chapter, block))
    drawn = [draw(block) for block in found]
    names = [_name(chapter.name, number) for number in range(len(found))]
    figures = {name: figure for name, figure in zip(names, drawn, strict=True) if figure}
    return FilledChapter(
        definition=chapter,
        found=found,
        blocks=tuple(block_layout(chapter, block) for block in found),
        pictures=tuple((name,) if name in figures else () for name in names),
        figures=figures,
    )


def citation_of(chapters: Sequence[FilledChapter]) -> str:
    """The source of the columns "paper", where a chapter names no other."""
    found = dict.fromkeys(each.definition.citation for each in chapters)
    return next(iter(found))


def citation_text(each: FilledChapter, common: str) -> str:
    """The sentence with a chapter's own source; empty where it is the common one."""
    own = each.definition.citation
    return "" if own == common else f'Here columns "paper" have what is printed in: {own}.'


def _name(chapter: str, number: int) -> str:
    return f"{chapter}_{number + 1}.png" if number else f"{chapter}.png"
