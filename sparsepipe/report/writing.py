"""Fills chapters from finished runs, and writes Markdown, CSV, pictures and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.plots import style
from sparsepipe.report.chapter import Block, Cell, Chapter, Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.documents import Failure, markdown, page
from sparsepipe.report.layout import FilledChapter, fill
from sparsepipe.report.measurements import Place
from sparsepipe.utils.files import write_text_atomic
from sparsepipe.utils.tables import write_csv


def csv_rows(chapter: FilledChapter) -> list[dict[str, Any]]:
    """The cells of all blocks, with the same keys in all rows."""
    return [
        row for block in chapter.found for row in _rows(chapter.definition.name, block, chapter)
    ]


def _rows(name: str, block: Block, chapter: FilledChapter) -> Iterator[dict[str, Any]]:
    for cell in block.cells:
        known = {
            "quantity": cell.column.key,
            "unit": cell.column.unit,
            **_paper(cell),
            **_ours(cell),
            "compared": cell.compared,
            "comparison": cell.column.compare.name.lower(),
            "command": cell.command,
        }
        labels = dict(zip(chapter.definition.heads, cell.row, strict=True))
        assert not labels.keys() & known.keys(), "a column of its own for each"
        yield {"exhibit": name, "setting": block.title, **labels, **known}


def _paper(cell: Cell) -> dict[str, Any]:
    paper = cell.paper
    return {
        "paper": None if paper is None else paper.text,
        "paper_source": None if paper is None else paper.derived or "printed",
    }


def _ours(cell: Cell) -> dict[str, Any]:
    ours = cell.ours
    runs = () if ours is None else ours.runs
    places = list(dict.fromkeys(Place.of(run) for run in runs))
    least, most = (None, None) if ours is None or ours.spread is None else ours.spread
    return {
        "ours": None if ours is None else ours.value,
        "ours_least": least,
        "ours_most": most,
        "averaged": None if ours is None else ours.count,
        "status": "missing" if cell.missing else "" if ours is None else "there",
        "note": None if ours is None else ours.note,
        "kind": _joined(place.kind for place in places),
        "hardware": _joined(place.hardware for place in places),
        "versions": _joined(place.versions for place in places),
        "commit": _joined(place.commit for place in places),
        "runs": _joined(str(run.get("run_id")) for run in runs),
    }


def _joined(words: Iterator[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def write_report(
    directory: Path,
    title: str,
    chapters: Sequence[tuple[Chapter, Sequence[Row]]],
    *,
    commands: Mapping[str, Commands] | None = None,
    failures: Sequence[Failure] = (),
) -> list[FilledChapter]:
    """Writes ``report.html``, ``report.md``, and for each chapter ``<name>.csv`` and pictures.
    Raises a DataError where a file cannot be written.
    """
    made_by = commands or {}
    filled = [fill(chapter, rows, made_by.get(chapter.name)) for chapter, rows in chapters]
    pictures = {name: directory / name for each in filled for name in each.figures}
    for each in filled:
        write_csv(directory / f"{each.definition.name}.csv", csv_rows(each))
        for name, figure in each.figures.items():
            style.save_png(figure, pictures[name])
    write_text_atomic(directory / "report.md", markdown(title, filled, failures))
    content: Mapping[str, bytes] = {name: path.read_bytes() for name, path in pictures.items()}
    write_text_atomic(directory / "report.html", page(title, filled, content, failures))
    return filled
