"""A filled chapter as Markdown and as part of one HTML page, which needs no other files."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import jinja2
from matplotlib.figure import Figure

from sparsepipe.plots import style
from sparsepipe.report.chapter import HOW_COMPARED, MISSING, Block, Cell, Chapter, Column, Compare
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.report.measurements import MeasuringPlace, letters
from sparsepipe.report.tables import SweepCommand
from sparsepipe.runs.ledger_table import Row
from sparsepipe.utils.tables import markdown_table

NOTHING = "-"


class Role(Enum):
    """The origin of a text."""

    LABEL = "label"
    PAPER = "paper"
    OURS = "ours"
    COMPARED = "compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """A cell as it is set: text, and in print smaller text and marks of notes and places."""

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
class BlockLayout:
    """A block as it is set.

    Attributes:
        block: whose figures these are.
        groups: titles of columns, each with the heads of its parts.
        rows: as many texts each as the groups have heads.
        footnotes: by their marks.
        places: where its figures were taken, by their letters.
    """

    block: Block
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[tuple[CellText, ...], ...]
    footnotes: Mapping[str, str]
    places: Mapping[str, MeasuringPlace]

    @property
    def title(self) -> str:
        return self.block.title[:1].upper() + self.block.title[1:]

    @property
    def filled(self) -> tuple[int, int]:
        """Cells with a figure of ours, and all that may have one."""
        cells = self.block.cells
        there = sum(cell.ours is not None for cell in cells)
        return there, there + sum(cell.missing for cell in cells)

    @property
    def counted(self) -> str:
        there, fillable = self.filled
        uncounted = sum(cell.ours is not None and not cell.ours.counts for cell in self.block.cells)
        words = f", {uncounted} of them in words or as a bound" if uncounted else ""
        return f"{there} of {fillable} figures are there{words}."

    @property
    def sweep(self) -> str:
        """The command that makes what is missing; empty where nothing is."""
        there, fillable = self.filled
        return self.block.sweep if there < fillable else ""

    @property
    def runs(self) -> Mapping[str, int]:
        """The number of runs from each place, by its letter."""
        found = [MeasuringPlace.of(run) for run in self.block.runs]
        return {letter: found.count(place) for letter, place in self.places.items()}


def block_layout(chapter: Chapter, block: Block) -> BlockLayout:
    """A block of a chapter as texts."""
    places = letters(block.runs)
    numbers: dict[str, str] = {}

    def number(note: str) -> str:
        return numbers.setdefault(note, str(len(numbers) + 1))

    def texts(cell: Cell) -> Iterator[CellText]:
        paper, ours, column = cell.paper, cell.ours, cell.column
        if column.printed and paper is None:
            yield CellText(role=Role.PAPER, text=NOTHING)
        elif column.printed and paper is not None:
            source = (number(paper.derived),) if paper.derived else ()
            yield CellText(role=Role.PAPER, text=paper.text, marks=source)
        if ours is None:
            yield CellText(role=Role.OURS, text=MISSING if cell.missing else NOTHING)
        else:
            small = ""
            if ours.spread is not None:
                small = f"{' to '.join(map(column.text, ours.spread))}, {ours.count} runs"
            marks = tuple(sorted({places[MeasuringPlace.of(run)] for run in ours.runs}))
            if ours.note and column.compare is not Compare.WORDS:
                marks = (*marks, number(ours.note))
            yield CellText(role=Role.OURS, text=column.text(ours.value), small=small, marks=marks)
        if column.compare is not Compare.NOT:
            yield CellText(role=Role.COMPARED, text=compared_text(cell))

    columns = block.columns
    rows = []
    for labels, cells in block.rows.items():
        row = [CellText(role=Role.LABEL, text=label) for label in labels]
        for column in columns:
            row += texts(cells.get(column) or Cell(row=labels, column=column, expected=False))
        rows.append(tuple(row))
    return BlockLayout(
        block=block,
        groups=(("", chapter.heads), *((column.title, _heads(column)) for column in columns)),
        rows=tuple(rows),
        footnotes={mark: note for note, mark in numbers.items()},
        places={letter: place for place, letter in places.items()},
    )


def _heads(column: Column) -> tuple[str, ...]:
    compared = (column.compare.value,) if column.compare is not Compare.NOT else ()
    return (*(("paper",) if column.printed else ()), "ours", *compared)


def compared_text(cell: Cell) -> str:
    """Our value against the paper's, as it is printed."""
    if cell.column.compare is Compare.WORDS:
        return (cell.ours.note if cell.ours else "") or NOTHING
    value = cell.compared
    if value is None:
        return NOTHING
    return f"{value:.2f}" if cell.column.compare is Compare.RATIO else f"{value:+.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledChapter:
    """A chapter with our figures.

    Attributes:
        definition: the chapter.
        blocks: its blocks as they are set.
        pictures: the name of each block's picture, or None.
        figures: pictures by their names.
    """

    definition: Chapter
    blocks: tuple[BlockLayout, ...]
    pictures: tuple[str | None, ...]
    figures: Mapping[str, Figure]


def fill(chapter: Chapter, rows: Sequence[Row], sweep: SweepCommand | None = None) -> FilledChapter:
    """Fills a chapter from finished runs."""
    blocks = chapter.blocks(rows, sweep)
    figures: dict[str, Figure] = {}
    pictures: list[str | None] = []
    for number, block in enumerate(blocks, 1):
        figure = chapter.draw(block) if chapter.draw else beside_each_other(chapter, block)
        name = f"{chapter.name}_{number}.png" if number > 1 else f"{chapter.name}.png"
        pictures.append(name if figure else None)
        if figure:
            figures[name] = figure
    return FilledChapter(
        definition=chapter,
        blocks=tuple(block_layout(chapter, block) for block in blocks),
        pictures=tuple(pictures),
        figures=figures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that did not finish."""

    job: str
    error: str


def citation_text(chapter: FilledChapter, common: str) -> str:
    """The sentence with a chapter's own source; empty where it is the common one."""
    own = chapter.definition.citation
    return "" if own == common else f'Here columns "paper" have what is printed in: {own}.'


def markdown(
    title: str, chapters: Sequence[FilledChapter], failures: Sequence[Failure] = ()
) -> str:
    """The whole report as Markdown."""
    citation = chapters[0].definition.citation
    parts = [
        f"# {title}",
        f'Columns "paper" have what is printed in: {citation}. Columns "ours" have what our '
        "finished runs found: the mean over seeds, and in brackets the least and the most where "
        "there are several. The letter behind a figure leads to where it was taken, a number to a "
        f"note below the table. {HOW_COMPARED}",
    ]
    if failures:
        parts.append("## Jobs of this sweep that did not finish")
        listed = (f"- {each.job}\n\n{textwrap.indent(each.error, 6 * ' ')}" for each in failures)
        parts.append("\n".join(listed))
    for chapter in chapters:
        definition = chapter.definition
        parts.append(f"## {definition.title}")
        parts.append(" ".join(filter(None, (definition.about, citation_text(chapter, citation)))))
        for layout, picture in zip(chapter.blocks, chapter.pictures, strict=True):
            parts += _block_markdown(layout)
            if picture:
                parts.append(f"![{definition.title}]({picture})")
    return "\n\n".join(parts) + "\n"


def _block_markdown(layout: BlockLayout) -> Iterator[str]:
    if layout.title:
        yield f"### {layout.title}"
    head = [
        f"{title}: {name}" if title else name for title, heads in layout.groups for name in heads
    ]
    yield markdown_table(head, [[text.plain for text in row] for row in layout.rows])
    yield layout.counted
    if layout.footnotes:
        yield "\n".join(f"- [{mark}] {note}" for mark, note in layout.footnotes.items())
    if layout.block.notes:
        yield "\n".join(f"- {note}" for note in layout.block.notes)
    if layout.places:
        rows = [
            [letter, at.kind, at.hardware, at.versions, at.short_commit, str(layout.runs[letter])]
            for letter, at in layout.places.items()
        ]
        yield "Where these figures were taken:"
        yield markdown_table(("", "kind", "hardware", "versions", "commit", "runs"), rows)
    if layout.sweep:
        yield "The command that makes what is missing; it skips finished runs:"
        yield f"    {layout.sweep}"


def page(
    title: str,
    chapters: Sequence[FilledChapter],
    pictures: Mapping[str, bytes],
    failures: Sequence[Failure] = (),
) -> str:
    """The whole report as one HTML page, with the content of its PNG files by their names."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    images = {
        name: {
            "uri": f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}",
            # The header of a PNG file has its width.
            "width": round(int.from_bytes(png[16:20], "big") * 96 / style.DPI),
        }
        for name, png in pictures.items()
    }
    return environment.get_template("page.html.j2").render(
        title=title,
        citation=chapters[0].definition.citation,
        citation_text=citation_text,
        how_compared=HOW_COMPARED,
        chapters=chapters,
        failures=failures,
        pictures=images,
        missing=MISSING,
    )
