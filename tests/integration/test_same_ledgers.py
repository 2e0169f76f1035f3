"""The comparison with the recorded ledger sees what is lost, and passes what may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sparsepipe.runs.ledger import load_results
from tests.support.same_ledgers import assert_as_recorded

RECORDED = Path(__file__).parents[2] / "experiments" / "table2_smoke" / "ledger.csv"
Change = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(scope="module")
def ledger() -> pd.DataFrame:
    return load_results(RECORDED)


def setting(column: str, value: object, *, at: int | slice = 0) -> Change:
    """Sets a cell of a column, or all of them."""

    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.astype({column: object})
        frame.loc[frame.index[at], column] = value
        return frame

    return change


TRAINED = 0  # the first row is of a training
EVERY = slice(None)


def test_the_recorded_ledger_is_of_a_whole_sweep(ledger: pd.DataFrame) -> None:
    assert sorted(ledger["task_name"]) == 8 * ["fit_batch"] + 16 * ["train"]
    assert set(ledger["starts"]) == {1}, "undisturbed"
    assert ledger["task_name"].iloc[TRAINED] == "train"


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.drop(index=frame.index[5]),
        setting("test/accuracy", None, at=TRAINED),
        setting("steps", 3, at=TRAINED),
        setting("data.resolution", 32, at=EVERY),
        setting("train/loss", 1.0, at=TRAINED),
        setting("run_id", "0123456789ab"),
    ],
)
def test_changed_ledgers_are_detected(ledger: pd.DataFrame, change: Change) -> None:
    found = change(ledger)
    with pytest.raises(AssertionError):
        assert_as_recorded(found, ledger)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [setting("starts", 3), setting("epoch_time_s", 9.0), setting("git_commit", "0" * 40)],
        [setting("cuda", None, at=EVERY), setting("train/loss", 1.0, at=TRAINED)],
        [setting("hardware_devices", "1 x other", at=EVERY), setting("run_id", "0123456789ab")],
        [lambda frame: frame.assign(**{"task.new": 1}), setting("run_id", "0123456789ab")],
    ],
)
def test_what_may_differ_passes(ledger: pd.DataFrame, changes: list[Change]) -> None:
    found = ledger
    for change in changes:
        found = change(found)
    assert_as_recorded(found, ledger)
