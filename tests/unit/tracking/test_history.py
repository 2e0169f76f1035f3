"""The record of what a tracker was told, and where it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.callbacks import Resume
from sparsepipe.tracking.history import STEP, History

EPOCHS = [
    {"epoch": str(n), "step": str(4 * n + 4), "time/epoch_s": "2", "train/loss": f"0.{9 - n}"}
    for n in range(3)
]


def place(epoch: int, batches: int, steps: int) -> Resume:
    at = {"epoch": epoch, "batches": batches, "steps": steps}
    return Resume(path=Path("last.ckpt"), **at, randomness=[], loaders=[], metrics={})


def steps(history: History) -> list[int]:
    return [row[STEP] for row in history.rows()]


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Four steps an epoch; the third epoch is under way."""
    found = History(tmp_path / "wandb" / "history.jsonl")
    for step in range(10):
        found.append({"loss": float(step), "epoch": step // 4, STEP: step})
        if step in (3, 7):
            found.append({"time/epoch_s": 2.0, "epoch": step // 4, STEP: step})
    return found


def test_what_is_appended_is_there(tmp_path: Path) -> None:
    history = History(tmp_path / "deep" / "history.jsonl")
    assert history.rows() == []
    row = {"a": 1, "b": 0.25, "c": "text", "d": True, "e": np.float32(0.5), "f": np.int64(3)}
    history.append({**row, "picture": object(), "nested": {"a": 1}, "none": None})
    history.append({"loss": float("nan"), "worse": float("inf")})
    first, second = History(history.path).rows()
    assert first == row
    assert np.isnan(second["loss"])
    assert second["worse"] == float("inf")
    history.clear()
    assert history.rows() == []
    history.clear()


def test_a_line_that_was_cut_off_does_not_count(history: History) -> None:
    whole = history.path.read_bytes()
    history.path.write_bytes(whole[:-3])
    assert steps(history) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8]


def test_rows_of_repeated_steps_are_dropped(history: History) -> None:
    history.resume(place(2, 0, 8), EPOCHS)
    assert steps(history) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7]
    history.resume(place(1, 2, 6), EPOCHS)
    assert steps(history) == [0, 1, 2, 3, 3, 4, 5]
    history.append({"loss": 1.0, "epoch": 1, STEP: 6})
    assert steps(history)[-2:] == [5, 6]


def test_the_missing_row_of_an_epoch_is_added(history: History) -> None:
    """Killed between the checkpoint of an epoch and its row."""
    lines = history.path.read_text().splitlines(keepends=True)
    del lines[9]
    history.path.write_text("".join(lines))
    history.resume(place(2, 0, 8), EPOCHS)
    assert steps(history) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7]
    assert history.rows()[-1] == {"epoch": 1, STEP: 7, "time/epoch_s": 2.0, "train/loss": 0.8}


def test_values_of_such_an_epoch_are_not_added_twice(history: History) -> None:
    """Its validation was told before the checkpoint, and is in the metrics file as well."""
    lines = history.path.read_text().splitlines(keepends=True)
    lines[9] = json.dumps({"val/loss": 0.5, "epoch": 1, STEP: 7}) + "\n"
    history.path.write_text("".join(lines))
    history.resume(place(2, 0, 8), [{**row, "val/loss": "0.5"} for row in EPOCHS])
    assert steps(history) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 7]
    *_, validated, epoch = history.rows()
    assert validated == {"epoch": 1, STEP: 7, "val/loss": 0.5}
    assert epoch == {"epoch": 1, STEP: 7, "time/epoch_s": 2.0, "train/loss": 0.8}


def test_without_a_history_rows_come_from_the_metrics_file(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.resume(place(2, 0, 8), [{**row, "val/loss": "", "test/loss": "1"} for row in EPOCHS])
    assert [(row["epoch"], row[STEP]) for row in history.rows()] == [(0, 3), (1, 7)]
    assert all(
        row.keys() == {"epoch", STEP, "time/epoch_s", "train/loss"} for row in history.rows()
    )
