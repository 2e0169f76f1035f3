"""A report as Markdown and as one HTML page, which needs neither other files nor a network."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import jinja2

from sparsepipe.plots import style
from sparsepipe.report.chapter import HOW_COMPARED, MISSING
from sparsepipe.report.layout import BlockLayout, FilledChapter, citation_of, citation_text
from sparsepipe.utils.tables import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A job that did not finish."""

    job: str
    error: str


def markdown(
    title: str, chapters: Sequence[FilledChapter], failures: Sequence[Failure] = ()
) -> str:
    """The whole report as Markdown."""
    citation = citation_of(chapters)
    parts = [f"# {title}", _introduction(citation), *_failures(failures)]
    for chapter in chapters:
        parts += _chapter(chapter, citation)
    return "\n\n".join(parts) + "\n"


def _introduction(citation: str) -> str:
    return (
        f'Columns "paper" have what is printed in: {citation}. Columns "ours" have what our '
        "finished runs found: the mean over seeds, and in brackets the least and the most where "
        "there are several. The letter behind a figure leads to where it was taken, a number to a "
        f"note below the table. {HOW_COMPARED}"
    )


def _failures(failures: Sequence[Failure]) -> Iterator[str]:
    if not failures:
        return
    yield "## Jobs of this sweep that did not finish"
    yield "\n".join(
        f"- {failure.job}\n\n{textwrap.indent(failure.error, 6 * ' ')}" for failure in failures
    )


def _chapter(chapter: FilledChapter, citation: str) -> Iterator[str]:
    yield f"## {chapter.definition.title}"
    yield " ".join(filter(None, (chapter.definition.about, citation_text(chapter, citation))))
    for block, pictures in zip(chapter.blocks, chapter.pictures, strict=True):
        if block.title:
            yield f"### {block.title[:1].upper()}{block.title[1:]}"
        yield _table(block)
        yield from _lists(block)
        yield from (f"![{chapter.definition.title}]({name})" for name in pictures)


def _table(block: BlockLayout) -> str:
    head = [
        f"{group.title}: {name}" if group.title else name
        for group in block.groups
        for name in group.heads
    ]
    return markdown_table(head, [[text.plain for text in row] for row in block.rows])


def _lists(block: BlockLayout) -> Iterator[str]:
    yield block.counted
    if block.footnotes:
        yield "\n".join(f"- [{mark}] {note}" for mark, note in block.footnotes.items())
    if block.notes:
        yield "\n".join(f"- {note}" for note in block.notes)
    if block.places:
        rows = [
            [letter, place.kind, place.hardware, place.versions, place.short_commit, str(runs)]
            for (letter, place), runs in zip(block.places.items(), block.runs.values(), strict=True)
        ]
        yield "Where these figures were taken:"
        yield markdown_table(("", "kind", "hardware", "versions", "commit", "runs"), rows)
    if block.gaps:
        yield "What is missing, and the commands that fill it:"
        yield "\n".join(f"- {gap.text}\n\n      {gap.command}" for gap in block.gaps)
        if block.sweep:
            skipping = "All of it by one command, which skips runs that are finished:"
            yield f"{skipping}\n\n    {block.sweep}"


def page(
    title: str,
    chapters: Sequence[FilledChapter],
    pictures: Mapping[str, bytes],
    failures: Sequence[Failure] = (),
) -> str:
    """The whole report as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        citation=citation_of(chapters),
        citation_text=citation_text,
        how_compared=HOW_COMPARED,
        chapters=chapters,
        failures=failures,
        pictures={name: _Picture.of(content) for name, content in pictures.items()},
        missing=MISSING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """A picture within the page."""

    uri: str
    width: int

    @classmethod
    def of(cls, png: bytes) -> Self:
        """From the content of a PNG file, whose header has its width."""
        encoded = base64.b64encode(png).decode("ascii")
        width = int.from_bytes(png[16:20], "big") * 96 / style.DPI
        return cls(uri=f"data:image/png;base64,{encoded}", width=round(width))
