"""What a run has told its tracker, on the disk as soon as it is told.

A tracker may lose what it was given: Weights & Biases without network holds up to 32 KiB in the
memory of a process of its own, and a run that is killed leaves an empty file. And it knows
nothing of checkpoints: what a run did after its last one is done again when it goes on.
"""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsepipe.callbacks.checkpoint import Resume
from sparsepipe.utils.files import write_text_atomic

STEP = "trainer/global_step"
"""Lightning's name for the training step that a row belongs to."""

_AT_EPOCHS_END = "time/epoch_s"
"""What every epoch's own row has, and no other."""

Row = dict[str, Any]


class History:
    """A file with a line of JSON for each row of values.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[Row]:
        """All rows in order; a last line that was cut off as it was written is left out."""
        try:
            lines = self.path.read_text(encoding="ascii").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a row; of its values those that are numbers or text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as stream:
            stream.write(_line(row))
            stream.flush()
            os.fsync(stream.fileno())

    def clear(self) -> None:
        """Forgets all rows."""
        self.path.unlink(missing_ok=True)

    def go_on(self, place: Resume, epochs: Sequence[Mapping[str, str]]) -> None:
        """Keeps what the run need not do again, and adds what it was too late to tell.

        The row of an epoch comes after the epoch's checkpoint. A run that was killed between
        the two, or that had no tracker until now, has it in its metrics file, together with what
        was told of the epoch before that, such as its validation; no figure is told twice.

        Args:
            place: where the run goes on.
            epochs: the rows of the metrics file.
        """
        kept = [row for row in self.rows() if row[STEP] < place.steps]
        told = {row.get("epoch") for row in kept if _AT_EPOCHS_END in row}
        missed = [_of_epoch(row) for row in epochs if int(row["epoch"]) < place.epoch]
        known = {(row.get("epoch"), name) for row in kept for name in row}
        kept += [_but(row, known) for row in missed if row["epoch"] not in told]
        kept.sort(key=lambda row: int(row[STEP]))
        write_text_atomic(self.path, "".join(map(_line, kept)))


def _line(row: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in row.items() if isinstance(value, (str, numbers.Real))}
    return json.dumps(plain, default=float) + "\n"  # numpy's numbers are no Python ones


def _but(row: Row, known: Collection[tuple[Any, str]]) -> Row:
    """A row of an epoch without the figures of it that are known."""
    about = ("epoch", STEP)
    return {k: v for k, v in row.items() if k in about or (row["epoch"], k) not in known}


def _of_epoch(row: Mapping[str, str]) -> Row:
    """A row of the metrics file as the tracker would have got it; the final test is told anew."""
    values = {
        name: float(value)
        for name, value in row.items()
        if value and name not in ("epoch", "step") and not name.startswith("test/")
    }
    return {**values, "epoch": int(row["epoch"]), STEP: int(row["step"]) - 1}
