"""Writes a report: Markdown, a CSV and pictures for each chapter, and one HTML page of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsepipe.results import style
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.chapters import Chapter, chapter
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Exhibit
from sparsepipe.results.report.failures import Failure
from sparsepipe.results.report.markdown import markdown
from sparsepipe.results.report.page import page
from sparsepipe.results.report.spreadsheet import csv_rows
from sparsepipe.results.tables import write_csv


def write_report(
    directory: Path,
    title: str,
    exhibits: Sequence[tuple[Exhibit, Sequence[Row]]],
    *,
    commands: Mapping[str, Commands] | None = None,
    failures: Sequence[Failure] = (),
) -> list[Chapter]:
    """Writes ``report.html``, ``report.md``, and for each exhibit ``<name>.csv`` and pictures.

    Args:
        directory: where to; it is made.
        title: of the document.
        exhibits: tables and figures of the paper, each with the finished runs of its experiment.
        commands: by the exhibit's name, make the commands that fill its cells.
        failures: jobs that have left no run.

    Returns:
        The chapters.

    Raises:
        DataError: a file cannot be written.
    """
    made_by = commands or {}
    chapters = [chapter(exhibit, rows, made_by.get(exhibit.name)) for exhibit, rows in exhibits]
    pictures = {name: directory / name for filled in chapters for name in filled.figures}
    for filled in chapters:
        write_csv(directory / f"{filled.exhibit.name}.csv", csv_rows(filled))
        for name, figure in filled.figures.items():
            style.save_png(figure, pictures[name])
    write_text_atomic(directory / "report.md", markdown(title, chapters, failures))
    content: Mapping[str, bytes] = {name: path.read_bytes() for name, path in pictures.items()}
    write_text_atomic(directory / "report.html", page(title, chapters, content, failures))
    return chapters
