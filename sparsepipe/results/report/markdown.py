"""A report as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from sparsepipe.results.report.cell import HOW_COMPARED
from sparsepipe.results.report.chapters import Chapter, citation_of, citation_text
from sparsepipe.results.report.failures import Failure
from sparsepipe.results.report.shown import ShownBlock
from sparsepipe.results.tables import markdown_table


def markdown(title: str, chapters: Sequence[Chapter], failures: Sequence[Failure] = ()) -> str:
    """The whole report.

    Args:
        title: of the document.
        chapters: one for each table or figure of the paper.
        failures: jobs that have left no run.
    """
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


def _chapter(chapter: Chapter, citation: str) -> Iterator[str]:
    yield f"## {chapter.exhibit.title}"
    yield " ".join(filter(None, (chapter.exhibit.about, citation_text(chapter, citation))))
    for block, pictures in zip(chapter.blocks, chapter.pictures, strict=True):
        if block.title:
            yield f"### {block.title[:1].upper()}{block.title[1:]}"
        yield _table(block)
        yield from _lists(block)
        yield from (f"![{chapter.exhibit.title}]({name})" for name in pictures)


def _table(block: ShownBlock) -> str:
    head = [
        f"{group.title}: {name}" if group.title else name
        for group in block.groups
        for name in group.heads
    ]
    return markdown_table(head, [[text.plain for text in row] for row in block.rows])


def _lists(block: ShownBlock) -> Iterator[str]:
    yield block.counted
    if block.footnotes:
        yield _listed(block.footnotes)
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


def _listed(notes: Mapping[str, str]) -> str:
    return "\n".join(f"- [{mark}] {note}" for mark, note in notes.items())
