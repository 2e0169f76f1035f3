"""What a part of the GPU kit has measured: one JSON file a part, written after every row.

A row that is there is not measured again, so that a part that was ended goes on where it was.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparsepipe.errors import DataError
from sparsepipe.utils.files import read_json, write_json

Row = Mapping[str, Any]
State = Literal["under way", "finished", "failed", "over its limit", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A part's file.

    Attributes:
        part: its name.
        state: how it ended.
        reason: why it did not finish; empty where it did.
        seconds: that it took, over all of its starts.
        limit_s: of one start.
        machine: device, driver, versions and commit.
        columns: headings of the keys of rows that a table shows.
        rows: what was measured; each has its name as ``row``, and ``error`` where it failed.
    """

    part: str
    state: State
    reason: str = ""
    seconds: float = 0.0
    limit_s: float
    machine: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record of a file.

        Raises:
            DataError: it is missing or no record.
        """
        values = read_json(path)
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(
                f"{path} is no record of the GPU kit: {error}",
                remedy="remove it, or give another --out",
            ) from error

    def write(self, path: Path) -> None:
        """Writes the file; it appears whole or not at all."""
        write_json(path, self)

    @property
    def measured(self) -> list[Row]:
        """Rows without an error."""
        return [row for row in self.rows if "error" not in row]

    @property
    def failed(self) -> list[Row]:
        """Rows with one."""
        return [row for row in self.rows if "error" in row]


class Rows:
    """Measures rows of a part and writes them as they come.

    Rows of an earlier start count where they tell a figure: those that failed, were skipped or
    wanted a library that was not there are measured again.

    Args:
        path: the part's file, which is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        record = Record.read(path)
        self._record = replace(record, rows=[row for row in record.measured if counts(row)])

    def measure(self, name: str, function: Callable[[], Row]) -> Row | None:
        """Keeps what ``function`` returns under ``name``; returns it, None where it failed.

        What was measured before is not measured again. A failure is kept and printed, and the
        part goes on with its next row.
        """
        if (found := self._found(name)) is not None:
            return found
        from sparsepipe.runs.out_of_memory import empty_device  # torch: readers do without

        started_s = time.perf_counter()
        try:
            values = function()
        except Exception as error:
            traceback.print_exc()
            values = {"error": f"{type(error).__name__}: {error}"[:2000]}
        empty_device()  # of what it has left there, if it failed, too
        row = {"row": name, **values, "measuring_s": round(time.perf_counter() - started_s, 3)}
        self._keep(row)
        return None if "error" in row else row

    def has(self, name: str) -> bool:
        """Whether there is such a row, measured in this start or before."""
        return self._found(name) is not None

    def fail(self, name: str, error: str) -> None:
        """Keeps a failure."""
        self._keep({"row": name, "error": error})

    def _found(self, name: str) -> Row | None:
        return next((row for row in self._record.measured if row["row"] == name), None)

    def _keep(self, row: Row) -> None:
        self._record = replace(self._record, rows=[*self._record.rows, row])
        self._record.write(self._path)
        seconds = f" ({row['measuring_s']:.1f} s)" if "measuring_s" in row else ""
        print(f"{row['row']}: {row.get('error', 'measured')}{seconds}", flush=True)


def counts(row: Row) -> bool:
    """Whether a row tells a figure, or that a test has passed; others are measured again."""
    return "missing" not in row and row.get("outcome") != "skipped"
