"""Tables as CSV and as Markdown that reads well in a terminal too."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.utils import reading
from sparsepipe.utils.files import PathLike, write_bytes_atomic


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned; columns of numbers to the right.

    Args:
        head: names of the columns.
        rows: cells, as many as there are columns.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, right, strict=True)
    ]
    lines = []
    for cells in (head, rule, *rows):
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def write_csv(path: PathLike, rows: Sequence[Mapping[str, Any]]) -> Path:
    r"""Writes rows with the same keys as CSV in UTF-8, atomically, and returns the path.

    Bytes of a file's name that are no text are written as ``\udcff``.

    Raises:
        ValueError: no rows exist.
        DataError: the file cannot be written.
    """
    if not rows:
        raise ValueError("a table without rows has no columns")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_bytes_atomic(path, stream.getvalue().encode("utf-8", "backslashreplace"))


def read_csv(path: PathLike, *needed: str) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of names at its top; cells stay text, blanks stay blank.

    Args:
        path: the file.
        needed: names of columns that it must have.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is no table, or one without these columns.
    """
    text = reading.read_text(path)
    try:
        table = csv.DictReader(io.StringIO(text, newline=""))
        rows = [{name: cell or "" for name, cell in row.items() if name} for row in table]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if lacking := [name for name in needed if name not in (table.fieldnames or ())]:
        raise ValueError(f"it has no column {' and none '.join(lacking)}")
    return rows


_NUMBER = re.compile(r"[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?\s?[%x]?", re.IGNORECASE)


def _is_number(cell: str) -> bool:
    text = cell.strip()
    return text in ("", "-") or _NUMBER.fullmatch(text) is not None
