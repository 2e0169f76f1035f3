"""A file in which a run keeps the rows that it logs to Weights & Biases.

Offline, Weights & Biases cannot resume a run: it begins another directory, and a killed run leaves
an empty file. A run that resumes therefore logs the kept rows again, into the new directory.
"""

from __future__ import annotations

import json
import numbers
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.callbacks import Resume
from sparsepipe.utils.files import free_name, write_text_atomic

STEP = "trainer/global_step"
"""Lightning's name for the training step that a row belongs to."""

_OF_EPOCH_END = "time/epoch_s"
"""A value that only the row at an epoch's end has."""

Row = dict[str, Any]


class History:
    """Rows kept in the file ``path``, one line of JSON each. The file need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[Row]:
        """Returns all rows in order, without a last line that is incomplete after a kill."""
        try:
            lines = self.path.read_text(encoding="ascii").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends the numbers and strings of a row, and waits until they are on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as stream:
            stream.write(_line(row))
            stream.flush()
            os.fsync(stream.fileno())

    def keep_copy(self, directory: Path) -> None:
        """Copies the file, if it exists, into ``directory`` under a name not in use there."""
        if self.path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.path, free_name(directory / self.path.name))

    def clear(self) -> None:
        """Removes all rows."""
        self.path.unlink(missing_ok=True)

    def resume(self, place: Resume, epochs: Sequence[Mapping[str, str]]) -> None:
        """Drops rows of steps that will be repeated, and adds missing rows of finished epochs.

        The row at an epoch's end is logged after the epoch's checkpoint. If the run was killed
        between the two, or had no tracker before, the row is made from ``epochs``, the rows of the
        metrics file, without values that were logged before, such as those of the validation.
        """
        kept = [row for row in self.rows() if row[STEP] < place.steps]
        ended = {row.get("epoch") for row in kept if _OF_EPOCH_END in row}
        finished = [_of_epoch(row) for row in epochs if int(row["epoch"]) < place.epoch]
        known = {(row.get("epoch"), name) for row in kept for name in row}
        kept += [
            {k: v for k, v in row.items() if k in ("epoch", STEP) or (row["epoch"], k) not in known}
            for row in finished
            if row["epoch"] not in ended
        ]
        kept.sort(key=lambda row: int(row[STEP]))
        write_text_atomic(self.path, "".join(map(_line, kept)))


def _line(row: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in row.items() if isinstance(value, (str, numbers.Real))}
    return json.dumps(plain, default=float) + "\n"  # default: for numpy's numbers


def _of_epoch(row: Mapping[str, str]) -> Row:
    """Converts a row of the metrics file to a tracker's, without the test: it will be repeated."""
    values = {
        name: float(value)
        for name, value in row.items()
        if value and name not in ("epoch", "step") and not name.startswith("test/")
    }
    return {**values, "epoch": int(row["epoch"]), STEP: int(row["step"]) - 1}
