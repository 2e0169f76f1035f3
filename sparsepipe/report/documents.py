"""Writes reports of filled chapters: Markdown, CSV, pictures, and an HTML page with all of it."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from matplotlib.figure import Figure

from sparsepipe.plots import style
from sparsepipe.report.chapter import HOW_COMPARED, MISSING, Block, Cell, Chapter, Compare
from sparsepipe.report.dot_plot import beside_each_other
from sparsepipe.report.measurements import MeasuringPlace, letters
from sparsepipe.runs.ledger_table import Row
from sparsepipe.utils.files import markdown_table, write_csv, write_text_atomic

NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """A cell of a printed table: text, smaller text, and marks of notes and measuring places."""

    role: Literal["label", "paper", "ours", "compared"]
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
    """A block as texts for printing.

    Attributes:
        title: the block's title, with a capital letter at its beginning.
        groups: title of each :class:`Column` (empty for labels), with headings of its parts.
        rows: texts of each row, one for each heading.
        filled: number of cells with a figure of ours, and of cells that may have one.
        counted: a sentence with these numbers.
        sweep: the command that makes missing figures; empty if none is missing.
        footnotes: notes on cells by the marks in these.
        places: measuring places by the letters in cells, each with its number of runs.
        picture: file name of its picture, if any.
    """

    block: Block
    title: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[tuple[CellText, ...], ...]
    filled: tuple[int, int]
    counted: str
    sweep: str
    footnotes: Mapping[str, str]
    places: Mapping[str, tuple[MeasuringPlace, int]]
    picture: str | None


def _cell_texts(
    cell: Cell, places: Mapping[MeasuringPlace, str], numbers: dict[str, str]
) -> Iterator[CellText]:
    """Yields texts of the paper's value, ours and their comparison; numbers new notes."""
    paper, ours, column = cell.paper, cell.ours, cell.column
    if column.printed:
        source: tuple[str, ...] = ()
        if paper and paper.derived:
            source = (numbers.setdefault(paper.derived, str(len(numbers) + 1)),)
        yield CellText(role="paper", text=paper.text if paper else NOTHING, marks=source)
    if ours is None:
        yield CellText(role="ours", text=MISSING if cell.missing else NOTHING)
    else:
        small = ""
        if ours.spread is not None:
            small = f"{' to '.join(map(column.text, ours.spread))}, {ours.count} runs"
        marks = tuple(sorted({places[MeasuringPlace.of(run)] for run in ours.runs}))
        if ours.note and column.compare is not Compare.WORDS:
            marks = (*marks, numbers.setdefault(ours.note, str(len(numbers) + 1)))
        yield CellText(role="ours", text=column.text(ours.value), small=small, marks=marks)
    if column.compare is Compare.WORDS:
        yield CellText(role="compared", text=(ours.note if ours else "") or NOTHING)
    elif column.compare is not Compare.NOT:
        form, compared = "{:.2f}" if column.compare is Compare.RATIO else "{:+.2f}", cell.compared
        yield CellText(role="compared", text=NOTHING if compared is None else form.format(compared))


def block_layout(chapter: Chapter, block: Block, picture: str | None) -> BlockLayout:
    """Turns a block into texts; ``picture`` is the file name of its picture, if it has one."""
    places, numbers = letters(block.runs), dict[str, str]()
    rows = []
    for labels, cells in block.rows.items():
        row = [CellText(role="label", text=label) for label in labels]
        for column in block.columns:
            cell = cells.get(column) or Cell(row=labels, column=column, expected=False)
            row += _cell_texts(cell, places, numbers)
        rows.append(tuple(row))
    groups = [("", chapter.heads)]
    for column in block.columns:
        heads = ["paper"] if column.printed else []
        compared = [column.compare.value] if column.compare is not Compare.NOT else []
        groups.append((column.title, (*heads, "ours", *compared)))
    there = sum(cell.ours is not None for cell in block.cells)
    fillable = there + sum(cell.missing for cell in block.cells)
    uncounted = sum(cell.ours is not None and not cell.ours.counts for cell in block.cells)
    in_words = f", {uncounted} of them in words or as a bound" if uncounted else ""
    taken = [MeasuringPlace.of(run) for run in block.runs]
    return BlockLayout(
        block=block,
        title=block.title[:1].upper() + block.title[1:],
        groups=tuple(groups),
        rows=tuple(rows),
        filled=(there, fillable),
        counted=f"{there} of {fillable} figures are filled in{in_words}.",
        sweep=block.sweep if there < fillable else "",
        footnotes={mark: note for note, mark in numbers.items()},
        places={letter: (place, taken.count(place)) for place, letter in places.items()},
        picture=picture,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledChapter:
    """A chapter with our values filled in; ``figures`` has its pictures by file name."""

    definition: Chapter
    blocks: tuple[BlockLayout, ...]
    figures: Mapping[str, Figure]


def fill(chapter: Chapter, rows: Sequence[Row], given: Sequence[str] = ()) -> FilledChapter:
    """Fills a chapter from finished runs; ``given`` as for :meth:`Chapter.blocks`."""
    layouts, figures = [], dict[str, Figure]()
    for number, block in enumerate(chapter.blocks(rows, given), 1):
        figure = chapter.draw(block) if chapter.draw else beside_each_other(chapter, block)
        name = f"{chapter.name}_{number}.png" if number > 1 else f"{chapter.name}.png"
        if figure:
            figures[name] = figure
        layouts.append(block_layout(chapter, block, name if figure else None))
    return FilledChapter(definition=chapter, blocks=tuple(layouts), figures=figures)


Failures = Sequence[tuple[str, str]]
"""Label and error of each job that did not finish."""


def citation_text(chapter: FilledChapter, common: str) -> str:
    """A sentence that names the source of a chapter's values; empty if it is that in ``common``."""
    own = chapter.definition.citation
    return "" if own == common else f'Here, columns "paper" show values printed in: {own}.'


def markdown(title: str, chapters: Sequence[FilledChapter], failures: Failures = ()) -> str:
    """The whole report as Markdown."""
    citation = chapters[0].definition.citation
    parts = [
        f"# {title}",
        f'Columns "paper" show values printed in: {citation}. Columns "ours" show results of our '
        "finished runs: the mean over seeds, with the smallest and the largest value in brackets "
        "if there are several. A letter after a figure refers to where it was measured, a number "
        f"to a note below the table. {HOW_COMPARED}",
    ]
    if failures:
        parts.append("## Jobs of this sweep that did not finish")
        listed = (f"- {job}\n\n{textwrap.indent(error, 6 * ' ')}" for job, error in failures)
        parts.append("\n".join(listed))
    for chapter in chapters:
        definition = chapter.definition
        parts.append(f"## {definition.title}")
        parts.append(" ".join(filter(None, (definition.about, citation_text(chapter, citation)))))
        for layout in chapter.blocks:
            parts += _block_markdown(layout)
            if layout.picture:
                parts.append(f"![{definition.title}]({layout.picture})")
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
            [letter, at.kind, at.hardware, at.versions, at.short_commit, str(count)]
            for letter, (at, count) in layout.places.items()
        ]
        yield "Where these figures were measured:"
        yield markdown_table(("", "kind", "hardware", "versions", "commit", "runs"), rows)
    if layout.sweep:
        yield "The command that makes the missing figures; it skips finished runs:"
        yield f"    {layout.sweep}"


def page(
    title: str,
    chapters: Sequence[FilledChapter],
    pictures: Mapping[str, bytes],
    failures: Failures = (),
) -> str:
    """The whole report as one HTML page; ``pictures`` has the content of PNG files by name."""
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
            # The header of a PNG file has its width in pixels.
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


def csv_rows(chapter: FilledChapter) -> Iterator[dict[str, Any]]:
    """Yields a row for each cell of all blocks; all rows have the same keys."""
    for layout in chapter.blocks:
        for cell in layout.block.cells:
            ours, paper = cell.ours, cell.paper
            runs = () if ours is None else ours.runs
            places = [MeasuringPlace.of(run) for run in runs]
            names = ("kind", "hardware", "versions", "commit")
            several = {name: [getattr(place, name) for place in places] for name in names}
            several["runs"] = [str(run.get("run_id")) for run in runs]
            least, most = (None, None) if ours is None or ours.spread is None else ours.spread
            yield {
                "exhibit": chapter.definition.name,
                "setting": layout.block.title,
                **dict(zip(chapter.definition.heads, cell.row, strict=True)),
                "quantity": cell.column.key,
                "unit": cell.column.unit,
                "paper": None if paper is None else paper.text,
                "paper_source": None if paper is None else paper.derived or "printed",
                "ours": None if ours is None else ours.value,
                "ours_least": least,
                "ours_most": most,
                "averaged": None if ours is None else ours.count,
                "status": "missing" if cell.missing else "" if ours is None else "there",
                "note": None if ours is None else ours.note,
                **{key: "; ".join(dict.fromkeys(words)) for key, words in several.items()},
                "compared": cell.compared,
                "comparison": cell.column.compare.name.lower(),
            }


def write_report(
    directory: Path,
    title: str,
    chapters: Sequence[tuple[Chapter, Sequence[Row]]],
    *,
    given: Sequence[str] = (),
    failures: Failures = (),
) -> list[FilledChapter]:
    """Writes ``report.html`` and ``report.md``, and ``<name>.csv`` and pictures of each chapter."""
    filled = [fill(chapter, rows, given) for chapter, rows in chapters]
    pictures: dict[str, bytes] = {}
    for each in filled:
        write_csv(directory / f"{each.definition.name}.csv", list(csv_rows(each)))
        for name, figure in each.figures.items():
            style.save_png(figure, directory / name)
            pictures[name] = (directory / name).read_bytes()
    write_text_atomic(directory / "report.md", markdown(title, filled, failures))
    write_text_atomic(directory / "report.html", page(title, filled, pictures, failures))
    return filled
