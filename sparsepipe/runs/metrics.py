"""The metrics file of a run: its rows, and the series of each metric.

``metrics.csv`` has one row for each epoch, with the columns ``epoch`` (from 0), ``step`` and one
for each metric. A cell is blank if the epoch has no value: not every epoch is validated, and
the values of a final test are in the last row.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsepipe.errors import DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_csv, write_text_atomic

Row = Mapping[str, Any]
_KEYS = ("epoch", "step")


@dataclass(frozen=True, slots=True)
class Series:
    """The values of a metric: ``values[i]`` is that of epoch ``epochs[i]``, counted from 0."""

    epochs: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.epochs)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Reads the rows of a metrics file; values stay text, and blank cells stay blank."""
    source = Path(path)
    remedy = "give the metrics.csv of a run that finished at least one epoch"
    with reading.explained(source, "metrics file", error=DataError, remedy=remedy):
        rows = read_csv(source, "epoch")
        if not rows:
            raise ValueError("it has no rows")
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics file, empty without a file. Cells are text, either a number or
    blank; any other raises a DataError.
    """
    rows = read_metrics(path) if path.exists() else []
    for line, row in enumerate(rows, 2):
        for name, cell in row.items():
            is_number = cell.isdecimal()
            with suppress(ValueError):
                is_number |= name != "epoch" and isinstance(float(cell or 0), float)
            if not is_number:
                raise DataError(
                    f"metrics file {path}, line {line}: {name} is {reading.shown(cell)}, "
                    "not a number",
                    remedy="correct it, or set force=true to run anew",
                )
    return list(rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with all of their columns, epoch and step first; missing cells are blank."""
    names = sorted({name for row in rows for name in row} - set(_KEYS))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[*_KEYS, *names], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text_atomic(path, text.getvalue())


def add_to_last_row(path: Path, values: Mapping[str, float]) -> None:
    """Adds cells, such as those of the final test, to the last epoch's row, if any."""
    rows = read_rows(path)
    if rows:
        rows[-1].update(values)
        write_rows(path, rows)


def epoch_series(rows: Iterable[Row], name: str) -> Series:
    """The series of the metric ``name`` over the epochs.

    Blank, unreadable and non-finite values are left out, and so are rows without an epoch; if two
    rows have the same epoch, the later one counts.
    """
    by_epoch: dict[int, float] = {}
    for row in rows:
        epoch, value = _number(row.get("epoch")), _number(row.get(name))
        if epoch is not None and value is not None:
            by_epoch[int(epoch)] = value
    return Series(epochs=tuple(by_epoch), values=tuple(by_epoch.values()))


def last_value(rows: Iterable[Row], name: str) -> float | None:
    """The last finite value of the metric ``name``; None if no row has one."""
    values = [value for row in rows if (value := _number(row.get(name))) is not None]
    return values[-1] if values else None


def _number(cell: Any) -> float | None:
    try:
        value = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
