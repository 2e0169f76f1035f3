"""The document on results says of every known column what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparsepipe.results.columns import ALWAYS, OF_TASKS, Column

TEXT = (Path(__file__).parents[2] / "docs" / "results.md").read_text()


def rows(heading: str) -> list[tuple[str, str]]:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\| [^|]+ \|$", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "columns"),
    [("Columns of every ledger", ALWAYS), ("Columns of some tasks", OF_TASKS)],
)
def test_the_document_lists_the_columns(heading: str, columns: tuple[Column, ...]) -> None:
    """All of them, in their order, with the unit of their numbers."""
    assert rows(heading) == [(column.name, column.unit) for column in columns]


def test_units_stand_in_names() -> None:
    endings = {"_s": "s", "_bytes": "bytes", "_bytes_per_s": "bytes/s", "_per_s": "1/s"}
    for column in (*ALWAYS, *OF_TASKS):
        ending = next((e for e in ("_bytes_per_s", "_per_s", "_bytes", "_s")
                       if column.name.endswith(e)), None)  # fmt: skip
        if ending is not None:
            assert column.unit == endings[ending], column.name
