"""What a report's CSV says of its cells."""

from __future__ import annotations

import csv
from pathlib import Path

Row = dict[str, str]


def cells(file: Path, *heads: str) -> dict[tuple[str, ...], Row]:
    """By the labels of their rows and their quantities; all of one setting."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["setting"] for row in rows}) == 1
    return {(*(row[head] for head in heads), row["quantity"]): row for row in rows}


def there(file: Path, *heads: str) -> set[tuple[str, ...]]:
    """Those with a figure of ours."""
    found = cells(file, *heads).items()
    return {place for place, row in found if row["status"] == "there"}
