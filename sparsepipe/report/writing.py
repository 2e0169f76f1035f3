"""Fills chapters from finished runs, and writes Markdown, CSV, pictures and one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.plots import style
from sparsepipe.report.chapter import Chapter
from sparsepipe.report.documents import Failure, FilledChapter, fill, markdown, page
from sparsepipe.report.measurements import MeasuringPlace
from sparsepipe.report.tables import SweepCommand
from sparsepipe.runs.ledger_table import Row
from sparsepipe.utils.files import write_text_atomic
from sparsepipe.utils.tables import write_csv


def csv_rows(chapter: FilledChapter) -> Iterator[dict[str, Any]]:
    """The cells of all blocks, with the same keys in all rows."""

    def joined(words: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(words))

    for layout in chapter.blocks:
        for cell in layout.block.cells:
            ours, paper = cell.ours, cell.paper
            runs = () if ours is None else ours.runs
            places = [MeasuringPlace.of(run) for run in runs]
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
                "kind": joined(place.kind for place in places),
                "hardware": joined(place.hardware for place in places),
                "versions": joined(place.versions for place in places),
                "commit": joined(place.commit for place in places),
                "runs": joined(str(run.get("run_id")) for run in runs),
                "compared": cell.compared,
                "comparison": cell.column.compare.name.lower(),
            }


def write_report(
    directory: Path,
    title: str,
    chapters: Sequence[tuple[Chapter, Sequence[Row]]],
    *,
    sweeps: Mapping[str, SweepCommand] | None = None,
    failures: Sequence[Failure] = (),
) -> list[FilledChapter]:
    """Writes ``report.html``, ``report.md``, and for each chapter ``<name>.csv`` and pictures.

    Raises:
        DataError: a file cannot be written.
    """
    made_by = sweeps or {}
    filled = [fill(chapter, rows, made_by.get(chapter.name)) for chapter, rows in chapters]
    pictures: dict[str, bytes] = {}
    for each in filled:
        write_csv(directory / f"{each.definition.name}.csv", list(csv_rows(each)))
        for name, figure in each.figures.items():
            style.save_png(figure, directory / name)
            pictures[name] = (directory / name).read_bytes()
    write_text_atomic(directory / "report.md", markdown(title, filled, failures))
    write_text_atomic(directory / "report.html", page(title, filled, pictures, failures))
    return filled
