"""A chapter as rows of a CSV: one for each cell, with all that is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparsepipe.results.report.cell import Cell
from sparsepipe.results.report.chapters import Chapter
from sparsepipe.results.report.exhibit import Block
from sparsepipe.results.report.places import Place


def csv_rows(chapter: Chapter) -> list[dict[str, Any]]:
    """The cells of all blocks, with the same keys in all rows."""
    return [row for block in chapter.found for row in _rows(chapter.exhibit.name, block, chapter)]


def _rows(name: str, block: Block, chapter: Chapter) -> Iterator[dict[str, Any]]:
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
        labels = dict(zip(chapter.exhibit.heads, cell.row, strict=True))
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
